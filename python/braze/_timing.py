"""Times a few functions against each other: interleaved."""

import time

import torch

# Repeats of the first round, in which all compete, and of the second, between the best.
_FIRST_REPEATS = 3
_LEAST_REPEATS, _MOST_REPEATS = 10, 60
_FINALISTS = 3


class CudaTimer:
    """Events around replays of CUDA graphs, so that what is compared is the kernels. Caches are
    cold, as in benchmarks/harness.py."""

    def __init__(self, device):
        self.device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.scratch = torch.empty(4 * l2_bytes, dtype=torch.int8, device=device)
        self.stream = torch.cuda.Stream(device)
        # One pool for all graphs: they run one after the other, and nobody reads their results.
        self.pool = torch.cuda.graph_pool_handle()

    def prepare(self, function):
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            function()  # libraries load their kernels
            self.stream.synchronize()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
            graph.replay()
        return graph

    def once(self, graph):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            self.scratch.zero_()
            # Keeps the GPU busy while the CPU enqueues the rest: launch latency stays out.
            torch.cuda._sleep(40_000)
            start.record()
            graph.replay()
            end.record()
        return start, end

    def microseconds(self, measurements):
        self.stream.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in measurements]


class CpuTimer:
    """The wall clock, so that what is compared includes the calls' overhead. Caches are warm: cold
    code and page tables would take longer than a small product."""

    def __init__(self, device):
        pass

    def prepare(self, function):
        function()
        return function

    def once(self, function):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def microseconds(self, measurements):
        return [seconds * 1e6 for seconds in measurements]


def timer_for(device):
    return (CudaTimer if device.type == "cuda" else CpuTimer)(device)


def compete(timer, functions, baseline, seconds):
    """Times of the baseline and of the fastest others.

    Args:
        functions: name -> function of no arguments.
        baseline: the name that is among the results whatever it takes.
        seconds: about how long the second round lasts. Its times alone count: those by which the
            best were picked would flatter them.

    Returns:
        name -> microseconds of each repeat; those of equal index were taken side by side.
    """
    prepared = {name: timer.prepare(function) for name, function in functions.items()}

    def interleaved(names, repeats):
        measured = {name: [] for name in names}
        for _ in range(repeats):
            for name in names:
                measured[name].append(timer.once(prepared[name]))
        return {name: timer.microseconds(times) for name, times in measured.items()}

    first = {name: min(times) for name, times in interleaved(prepared, _FIRST_REPEATS).items()}
    best = sorted(first.keys() - {baseline}, key=first.get)[:_FINALISTS]
    times = {name: [] for name in [baseline, *best]}
    end = time.perf_counter() + seconds
    while len(times[baseline]) < _MOST_REPEATS:
        for name, more in interleaved(times, _LEAST_REPEATS).items():
            times[name] += more
        if time.perf_counter() > end:
            break
    return times
