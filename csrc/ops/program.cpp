#include "ops/program.h"

#include <array>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "launchers/vector_add.h"

namespace braze {
namespace {

using torch::stable::detail::from;
using Make = std::function<StableIValue(const Registers&)>;
using Ints = std::vector<int64_t>;

const Tensor& at(const Registers& registers, int64_t i) { return registers.at(i).value(); }

std::vector<Tensor> all_of(const Registers& registers, const Ints& which) {
  std::vector<Tensor> tensors;
  tensors.reserve(which.size());
  for (const int64_t i : which) tensors.push_back(at(registers, i));
  return tensors;
}

Ints numbers_of(const std::string& list) {
  Ints numbers;
  std::istringstream in(list);
  for (std::string number; std::getline(in, number, ',');) numbers.push_back(std::stoll(number));
  return numbers;
}

ScalarType scalar_type_of(const std::string& name) {
  for (const ScalarType t :
       {ScalarType::Double, ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
        ScalarType::Byte, ScalarType::Int, ScalarType::Long}) {
    if (name == scalar_type_name(t)) return t;
  }
  throw std::runtime_error(concat("define_program: no dtype ", name));
}

template <typename T>
Make constant(T value, bool optional) {
  if (optional) return [value](const Registers&) { return from(std::optional<T>(value)); };
  return [value](const Registers&) { return from(value); };
}

// What puts an argument on the stack of a boxed front end, which takes it from there: lists,
// strings and optional values are allocated anew for each call.
Make argument(std::string token) {
  if (token == "-") return [](const Registers&) { return from(std::nullopt); };
  const bool optional = token[0] == '?';
  if (optional) token.erase(0, 1);
  const std::string rest = token.substr(1);
  switch (token[0]) {
    case 't': {
      const int64_t i = std::stoll(rest);
      if (optional) {
        return [i](const Registers& r) { return from(std::optional<Tensor>(at(r, i))); };
      }
      return [i](const Registers& r) { return from(at(r, i)); };
    }
    case '*': {
      const Ints which = numbers_of(rest);
      return [which](const Registers& r) { return from(all_of(r, which)); };
    }
    case 'i': return constant<int64_t>(std::stoll(rest), optional);
    case 'd': return constant<double>(std::stod(rest), optional);
    case 'b': return constant<bool>(rest == "1", optional);
    case 's': return constant<std::string>(rest, optional);
    case 'l': return constant<Ints>(numbers_of(rest), optional);
    case 'k': return constant<ScalarType>(scalar_type_of(rest), optional);
    case 'm': {
      std::array<bool, 16> flags{};  // std::vector has none to point to
      const size_t count = rest.size();
      BRAZE_CHECK(count <= flags.size() && !optional, "define_program: no argument ", token);
      for (size_t i = 0; i < count; ++i) flags[i] = rest[i] == '1';
      return [flags, count](const Registers&) {
        return from(torch::headeronly::HeaderOnlyArrayRef<bool>(flags.data(), count));
      };
    }
    default: throw std::runtime_error(concat("define_program: no argument ", token));
  }
}

using Run = std::function<void(Registers&)>;

Run alias(const std::vector<std::string>& tokens, int64_t result) {
  const int64_t source = std::stoll(tokens[0].substr(1)), ahead = std::stoll(tokens[3].substr(1));
  const Ints sizes = numbers_of(tokens[1].substr(1)), strides = numbers_of(tokens[2].substr(1));
  return [=](Registers& registers) {
    const Tensor& t = at(registers, source);
    int64_t offset;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(t.get(), &offset));
    AtenTensorHandle view;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), sizes.size(), sizes.data(),
                                                          strides.data(), offset + ahead, &view));
    registers.at(result) = Tensor(view);
  };
}

// Of two tensors of the same shape, strides and dtype. in_place: in the first one's memory.
Run sum(const std::vector<std::string>& tokens, int64_t result, bool in_place) {
  const int64_t a = std::stoll(tokens.at(0).substr(1)), b = std::stoll(tokens.at(1).substr(1));
  return [=](Registers& registers) {
    const Tensor first = at(registers, a), second = at(registers, b);
    if (!is_dense(first) || !same_layout(first, second)) {
      registers.at(result) = torch::stable::subtract(first, second, -1.0);
      return;
    }
    const Tensor out = in_place ? first : dense_like(first);
    const DeviceContext context(first);
    dev::vector_add(context.stream(), dtype_of("add", "a", first), first.const_data_ptr(),
                    second.const_data_ptr(), out.mutable_data_ptr(), out.numel(), kAnyKernel);
    registers.at(result) = out;
  };
}

struct Copied {
  int64_t source, result;
  ScalarType dtype;
  Ints sizes, strides;
};

bool is_float(ScalarType t) {
  return t == ScalarType::Double || t == ScalarType::Float || t == ScalarType::BFloat16 ||
         t == ScalarType::Half;
}

// Those that only change the dtype, from and to the first such one's, are one launch.
Run copies(const std::vector<std::string>& tokens, const Ints& results) {
  std::vector<Copied> all;
  for (size_t i = 0; i < results.size(); ++i) {
    const std::string* const t = &tokens[4 * i];
    all.push_back({std::stoll(t[0].substr(1)), results[i], scalar_type_of(t[1].substr(1)),
                   numbers_of(t[2].substr(1)), numbers_of(t[3].substr(1))});
  }
  return [all](Registers& registers) {
    std::vector<Tensor> outputs, inputs;
    for (const Copied& c : all) {
      const Tensor& source = at(registers, c.source);
      Tensor result =
          empty_strided(c.sizes.data(), c.strides.data(), c.sizes.size(), source, c.dtype);
      registers.at(c.result) = result;
      const bool casts = is_float(c.dtype) && is_float(source.scalar_type()) &&
                         c.dtype != source.scalar_type() && is_dense(source) &&
                         same_layout(source, result);
      if (casts && (inputs.empty() || (inputs[0].scalar_type() == source.scalar_type() &&
                                       outputs[0].scalar_type() == c.dtype))) {
        inputs.push_back(source);
        outputs.push_back(result);
      } else {
        TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(result.get(), source.get(), false));
      }
    }
    if (inputs.empty()) return;
    const Casts casts = checked_casts("copy", outputs, inputs);
    const DeviceContext context(inputs[0]);
    dev::cast(context.stream(), casts.from, casts.to, casts.tensors.data(),
              static_cast<int64_t>(casts.tensors.size()));
  };
}

Run call(const std::string& op, const std::vector<std::string>& tokens, const Ints& results) {
  const auto found = front_ends().find(op);
  BRAZE_CHECK(found != front_ends().end(), "define_program: no op ", op);
  const FrontEnd front_end = found->second;
  std::vector<Make> arguments;
  for (const std::string& token : tokens) arguments.push_back(argument(token));
  return [=](Registers& registers) {
    constexpr size_t kMost = 32;
    StableIValue stack[kMost];
    for (size_t i = 0; i < arguments.size(); ++i) stack[i] = arguments[i](registers);
    front_end(stack, arguments.size(), results.size());
    for (size_t i = 0; i < results.size(); ++i) {
      registers.at(results[i]) = torch::stable::detail::to<Tensor>(stack[i]);
    }
  };
}

Instruction parse_instruction(const std::string& line, size_t max_arguments) {
  std::istringstream in(line);
  std::string op, token;
  in >> op;
  std::vector<std::string> tokens;
  Ints results, dead;
  while (in >> token && token != ">") tokens.push_back(token);
  while (in >> token && token != ";") results.push_back(std::stoll(token));
  while (in >> token) dead.push_back(std::stoll(token));
  if (op == "alias") return {alias(tokens, results.at(0)), dead};
  if (op == "copy") return {copies(tokens, results), dead};
  if (op == "add" || op == "add_") return {sum(tokens, results.at(0), op == "add_"), dead};
  BRAZE_CHECK(tokens.size() <= max_arguments && results.size() <= max_arguments,
              "define_program: too many arguments of ", op);
  return {call(op, tokens, results), dead};
}

struct Programs {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<const Program>> all;
  int64_t next = 0;
};
Programs& programs() {
  static Programs defined;
  return defined;
}

std::vector<Tensor> joined(const std::vector<Tensor>& inputs, const std::vector<Tensor>& buffers) {
  std::vector<Tensor> all = inputs;
  all.insert(all.end(), buffers.begin(), buffers.end());
  return all;
}

// dropped: the numbers of programs that nobody will run any more.
int64_t define_program(const std::vector<Tensor>& inputs, const std::vector<Tensor>& buffers,
                       const std::string& text, const Ints& dropped) {
  auto program = std::make_shared<const Program>(parse_program(text, joined(inputs, buffers)));
  const std::lock_guard<std::mutex> lock(programs().mutex);
  for (const int64_t number : dropped) programs().all.erase(number);
  programs().all.emplace(programs().next, std::move(program));
  return programs().next++;
}

// Nothing where the inputs are not such as the program was made for.
std::vector<Tensor> run_program(const std::vector<Tensor>& inputs,
                                const std::vector<Tensor>& buffers, int64_t number) {
  std::shared_ptr<const Program> program;
  {
    const std::lock_guard<std::mutex> lock(programs().mutex);
    const auto found = programs().all.find(number);
    BRAZE_CHECK(found != programs().all.end(), "run_program: no program ", number);
    program = found->second;
  }
  const std::vector<Tensor> all = joined(inputs, buffers);
  if (signature_of(all) != program->signature) return {};
  Registers registers(program->registers);
  BRAZE_CHECK(all.size() <= registers.size(), "run_program: more inputs than registers");
  std::copy(all.begin(), all.end(), registers.begin());
  for (const Instruction& instruction : program->instructions) {
    instruction.run(registers);
    for (const int64_t i : instruction.dead) registers.at(i).reset();
  }
  return all_of(registers, program->results);
}

}  // namespace

std::vector<int64_t> signature_of(const std::vector<Tensor>& tensors) {
  std::vector<int64_t> signature;
  signature.reserve(10 * tensors.size());
  for (const Tensor& t : tensors) {
    if (t.is_cuda() != tensors[0].is_cuda() ||
        t.get_device_index() != tensors[0].get_device_index()) {
      return {};
    }
    int32_t dtype;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
    const auto sizes = t.sizes(), strides = t.strides();
    signature.push_back(dtype);
    signature.push_back(t.dim());
    signature.insert(signature.end(), sizes.begin(), sizes.end());
    signature.insert(signature.end(), strides.begin(), strides.end());
  }
  return signature;
}

Program parse_program(const std::string& text, const std::vector<Tensor>& inputs) {
  constexpr size_t kMostArguments = 32;
  std::istringstream in(text);
  std::string line;
  std::getline(in, line);
  std::istringstream head(line);
  Program program{signature_of(inputs), 0, {}, {}};
  head >> program.registers;
  for (int64_t i; head >> i;) program.results.push_back(i);
  while (std::getline(in, line)) {
    program.instructions.push_back(parse_instruction(line, kMostArguments));
  }
  return program;
}

BRAZE_IMPL(m) {
  m.impl("define_program", TORCH_BOX(&define_program));
  m.impl("run_program", TORCH_BOX(&run_program));
}

}  // namespace braze
