// Programs: what a run of ops does below autograd, to be done again in one call of an op. The host
// work of an op call (Python, the dispatcher, autograd) is then paid once for all of them.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ops/cast.h"

namespace braze {

// The tensors of a run: inputs first, then what instructions make.
using Registers = std::vector<std::optional<Tensor>>;

struct Instruction {
  std::function<void(Registers&)> run;
  std::vector<int64_t> dead;  // registers that nothing reads any more afterwards
};

struct Program {
  std::vector<int64_t> signature;  // of the inputs that it was made for
  int64_t registers;
  std::vector<Instruction> instructions;
  std::vector<int64_t> results;
};

// dtype, sizes and strides of all tensors; nothing in the place of tensors on several devices.
std::vector<int64_t> signature_of(const std::vector<Tensor>& tensors);

// The program as text, a line each:
//   <number of registers> <results>
//   <op> <arguments> > <registers of its results> ; <registers that are dead then>
// An op is a front end's name, or one of
//   alias: a view of a tensor, with sizes, strides and the distance to its first element;
//   copy: tensors, each followed by the dtype, the sizes and the strides of its copy;
//   add: the sum of two that are alike; add_: the same in the memory of the first.
// An argument is t5 (the tensor in register 5), *1,2 (a list of them), i5, d0x1p-1, b1, sauto,
// l1,2 (integers), m101 (booleans), kfloat32 (a dtype); where the op's is optional, with a ? before
// it, or - for None.
Program parse_program(const std::string& text, const std::vector<Tensor>& inputs);

}  // namespace braze
