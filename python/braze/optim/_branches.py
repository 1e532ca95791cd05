"""Parts of an update that do not depend on each other, as branches of a CUDA graph."""

import torch

#: branches at most, the main stream with them
MOST = 12


class Branches:
    """Runs parts of an update concurrently where they are captured in a CUDA graph: a short kernel
    leaves most of a GPU idle, and the next one of its part waits for it all the same.

    Args:
        device: of the update, a GPU.
    """

    def __init__(self, device):
        self._device = device
        # Now: a capture is no time to make them.
        self._streams = [torch.cuda.Stream(device) for _ in range(MOST - 1)]

    def run(self, parts):
        """Results of all parts, whose memory may be used on the current stream.

        Args:
            parts: (function that launches, its cost in any unit, whether it fills the GPU alone).
                What the functions read has to be kept until this returns.
        """
        if not torch.cuda.is_current_stream_capturing():
            return [function() for function, _, _ in parts]
        main = torch.cuda.current_stream(self._device)
        shares = shared_out([(cost, fills) for _, cost, fills in parts], MOST)
        streams = [main, *self._streams][: len(shares)]
        results = [None] * len(parts)
        for stream in streams[1:]:
            stream.wait_stream(main)
        try:
            for stream, share in zip(streams, shares, strict=True):
                with torch.cuda.stream(stream):
                    for i in share:
                        results[i] = parts[i][0]()
        finally:
            for stream in streams[1:]:
                main.wait_stream(stream)
        for i in (i for share in shares[1:] for i in share):
            # Memory of the branch's stream, which must not have it back before `main` has read it.
            results[i].record_stream(main)
        return results


def shared_out(costs, most):
    """Numbers of parts for each branch, the main one first: the dearest part first, each to where
    there is least to do. Parts that fill the GPU alone stay on the main one: at the same time they
    would be no faster, and need memory at the same time.

    Args:
        costs: (cost, whether it fills the GPU alone) of each part.
        most: how many branches there may be.
    """
    shares = [[i for i, (_, fills) in enumerate(costs) if fills]]
    loads = [sum(costs[i][0] for i in shares[0])]
    others = (i for i, (_, fills) in enumerate(costs) if not fills)
    for i in sorted(others, key=lambda i: -costs[i][0]):
        if min(loads) > 0 and len(shares) < most:
            shares.append([])
            loads.append(0)
        least = loads.index(min(loads))
        shares[least].append(i)
        loads[least] += costs[i][0]
    return shares
