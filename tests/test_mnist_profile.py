"""What `braze mnist --profile` makes of a GPU's trace; the trace here is made up."""

import pytest

pytest.importorskip("rich", reason="braze mnist needs rich")
pytest.importorskip("matplotlib", reason="braze mnist needs matplotlib")

from braze.mnist import profile


def op(name, start, length, **args):
    event = {"ph": "X", "cat": "cpu_op", "name": name, "tid": 1, "ts": start, "dur": length}
    return event | {"args": args}


def kernel(name, start, length, **args):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "args": args}


def test_kernels_find_the_op_that_launched_them():
    events = [
        op("braze::relu", 0, 50, **{"External id": 7, "Input Dims": [[2, 3]]}),
        op("aten::copy_", 10, 5, **{"External id": 8}),
        {"cat": "cuda_runtime", "tid": 1, "ts": 12, "dur": 1, "args": {"correlation": 31}},
        kernel("void braze::cuda::(anonymous namespace)::b_kernel<float, 3>(int)", 120, 4.5),
        kernel("copy_kernel", 110, 2, correlation=31),
        kernel("void braze::cuda::a_kernel<float>(Args<float>)", 100, 3, **{"External id": 7}),
    ]
    parts = profile._kernels(events)
    assert [part["name"] for part in parts] == ["a_kernel", "copy_kernel", "b_kernel"]
    assert [part["op"] for part in parts] == ["braze::relu", "aten::copy_", None]
    assert [part["start_us"] for part in parts] == [0, 10, 20]
    assert parts[0]["shapes"] == [[2, 3]]


def part(name, op, call, start, us):
    part = {"name": name, "op": op, "call": call, "start_us": start, "us": us}
    return part | {"shapes": [[64, 128]], "types": ["float"], "values": [""]}


def test_kernels_of_a_replay_get_the_ops_of_an_eager_step():
    names = [("copy", "x"), ("fprop", "conv"), ("dgrad", "grad"), ("wgrad", "grad"), ("sgd", "sgd")]
    eager = [part(name, op, i, i, 1.0) for i, (name, op) in enumerate(names)]
    # The two gradients run side by side, the second begins first; one kernel is the graph's own.
    order = ["copy", "own", "fprop", "wgrad", "dgrad", "sgd"]
    replays = [part(name, "of the replay", 1, i, 1.0) for i, name in enumerate(order)]
    profile._label(replays, eager)
    assert [p["op"] for p in replays] == ["x", None, "conv", "grad", "grad", "sgd"]
    assert [p["call"] for p in replays] == [0, None, 1, 3, 2, 4]


def test_time_of_kernels_side_by_side_counts_once():
    assert profile.busy([part("a", None, None, 0, 10), part("b", None, None, 4, 10)]) == 14
    assert profile.busy([part("a", None, None, 0, 10), part("b", None, None, 4, 2)]) == 10
    assert profile.busy([part("a", None, None, 20, 1), part("b", None, None, 0, 2)]) == 3


def test_own_times():
    """One that waits for the one before it, one beside others, one that ends before another."""
    times = [(0, 5), (1, 9), (12, 3), (11, 6), (13, 1), (20, 2)]
    parts = [part("a", None, None, *time) for time in times]
    profile.add_own_times(parts)
    assert [p["own_us"] for p in parts] == [5, 5, 3, 6, 1, 2]


def test_kernels_of_one_call_are_one_entry():
    parts = [
        part("a", "braze::relu", 1, 0, 2.0),
        part("b", "braze::relu", 1, 2, 3.0),
        part("a", "braze::relu", 2, 5, 2.0),
        part("c", None, None, 7, 1.0),
    ]
    device = {"bandwidth": 1e12, "peak": {"bf16": 1e15}}
    profile.add_own_times(parts)
    ops = profile._by_op(parts, device, "bf16")
    assert [entry["kernels"] for entry in ops] == [["a", "b"], ["a"], ["c"]]
    assert [entry["us"] for entry in ops] == [5.0, 2.0, 1.0]
    moved = 2 * 64 * 128 * 4
    assert ops[0]["bytes"] == moved
    assert ops[0]["floor_us"] == pytest.approx(1e6 * moved / 1e12)
    assert (ops[2]["op"], ops[2]["floor_us"]) == ("(other)", None)


def test_medians_leave_out_runs_of_another_length():
    def run(*times):
        return [{"name": str(i), "start_us": i, "us": us} for i, us in enumerate(times)]

    parts = profile._median([run(1, 10), run(3, 20), run(9, 9, 9), run(2, 30)])
    assert [part["us"] for part in parts] == [2, 20]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void braze::cuda::(anonymous namespace)::halo_kernel<float, (int)2>(Args)",
            "halo_kernel",
        ),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("braze::conv2d", "braze::conv2d"),
        ("sm90_xmma_gemm_f32<1>", "sm90_xmma_gemm_f32"),
    ],
)
def test_short_names(name, short):
    assert profile.short_name(name) == short
