"""Recording work in a CUDA graph so that a failure leaves torch and the model as they were."""

import contextlib
import gc

import torch

# Graphs whose capture CUDA refused to end. torch's allocators keep a callback into them, so that
# they must never be destroyed.
_failed_graphs = []


def record(work, stream, pool, generators=()):
    """Records what ``work()`` launches; nothing runs.

    Other threads may go on using the GPU ("thread_local"). An exception of `work` ends the capture
    and is raised again.

    Args:
        work: called once.
        stream: the side stream to record on.
        pool: from ``torch.cuda.graph_pool_handle()``; unusable after an exception.
        generators: ``torch.Generator``s from which `work` draws beside the default one.

    Returns:
        The graph, and what `work` returned.
    """
    # The graph's memory comes from a pool of its own: give back what earlier eager steps cached.
    # Cycles are collected now, because destroying another graph would break the capture.
    torch.cuda.synchronize(stream.device)
    gc.collect()
    torch.cuda.empty_cache()
    graph = _graph(generators)
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error is the one that says why
                _end(graph, stream, pool, generators)
            raise
        _end(graph, stream, pool, generators)
    # Beginning the capture has queued a reset of the random number generator's offset on `stream`,
    # which must not come after that of the first replay.
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    return graph, result


def _end(graph, stream, pool, generators):
    try:
        graph.capture_end()
    except RuntimeError:
        # What capture_end() leaves undone where CUDA reports the capture as invalid: allocations
        # go to the graph's pool, and the random number generator believes that it is captured.
        with contextlib.suppress(RuntimeError):  # raises where capture_end() got further
            torch._C._cuda_endAllocateToPool(stream.device.index, pool)
            torch._C._cuda_releasePool(stream.device.index, pool)
            _failed_graphs.append(graph)
        scratch = torch.zeros(1, device=stream.device)
        valid = _graph(generators)  # a whole capture frees the generators
        valid.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        scratch.zero_()  # an empty graph gives a warning
        valid.capture_end()
        raise


def _graph(generators):
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    return graph
