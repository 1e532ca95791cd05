"""Drawings of tensor cores, clusters, ways to cut work, convolution and launches."""

from card import BLUE, GREEN, GREY, ORANGE, PURPLE, SOFT, STAGES, TIMES, WHITE, card

# ---- tensor cores ----


@card(130)
def mma_sync(c):
    """mma.sync: a warp multiplies fragments in registers"""
    c.box(25, 30, 80, 64, BLUE, "A 16 x 16")
    c.text(120, 67, TIMES, 16)
    c.box(138, 30, 44, 64, ORANGE, "B", 12)
    c.note(160, 106, "16 x 8")
    c.text(200, 67, "=", 16)
    c.box(220, 30, 44, 64, GREEN, "C", 12)
    c.note(242, 106, "16 x 8")
    c.text(284, 55, "all three in registers", 11, "start")
    c.text(284, 71, "of the warp's lanes", 11, "start")


@card(140)
def wgmma(c):
    """wgmma: a warpgroup multiplies from shared memory"""
    c.box(20, 22, 130, 90, "#eef6ea")
    c.note(85, 16, "shared memory")
    c.box(30, 32, 50, 70, BLUE, "A", 12)
    c.box(90, 32, 50, 70, ORANGE, "B", 12)
    c.arrow(154, 66, 226, 66)
    c.note(190, 56, "descriptors")
    for i in range(4):
        c.box(230, 24 + i * 22, 120, 22, STAGES[i], f"warp {i}: 16 x N", 11)
    c.note(290, 130, "64 x N sums in registers, N up to 256")
    c.note(190, 82, "asynchronous")


@card(150)
def tf32(c):
    """Number formats: bits of sign, exponent and significand"""
    rows = (("fp32", 8, 23), ("TF32", 8, 10), ("bf16", 8, 7), ("fp16", 5, 10))
    for i, (name, exponent, fraction) in enumerate(rows):
        y = 12 + i * 31
        c.text(55, y + 16, name, 12, "end")
        c.box(62, y, 10, 24, GREY)
        c.box(72, y, exponent * 10, 24, ORANGE, f"{exponent}", 11)
        c.box(72 + exponent * 10, y, fraction * 10, 24, BLUE, f"{fraction}", 11)
    c.note(400, 145, "orange: range; blue: accuracy", "end")


@card(165)
def split(c):
    """Error-corrected split: three bf16 parts of an fp32 number"""
    c.box(20, 18, 180, 26, GREY, "24 bits of an fp32 significand", 11)
    for i, fill in enumerate((BLUE, ORANGE, GREEN)):
        c.box(20 + i * 60, 60, 60, 26, fill, f"p{i}: 8 bits", 10)
        c.line(20 + i * 60, 44, 20 + i * 60, 60, True)
    c.line(200, 44, 200, 60, True)
    c.note(118, 108, "v = p0 + p1 + p2, all bf16")
    for i in range(3):
        c.text(272 + i * 40, 24, f"p{i}", 11)
        c.text(244, 50 + i * 36, f"p{i}", 11)
    c.grid(255, 30, 3, 3, 36, lambda i, r: GREEN if i + r < 3 else WHITE)
    c.note(310, 156, "six of nine products matter")


# ---- clusters ----


@card(120)
def cluster(c):
    """Cluster: blocks that run together"""
    c.box(20, 15, 380, 70, "#eef3fa", dash=True)
    for i in range(4):
        c.box(35 + i * 92, 28, 74, 44, BLUE, f"block {i}")
    c.note(210, 105, "on neighbouring multiprocessors, at the same time")


@card(135)
def distributed_shared_memory(c):
    """Distributed shared memory: a block writes into another one's"""
    for i, x in enumerate((30, 250)):
        c.box(x, 15, 140, 85, WHITE)
        c.text(x + 70, 32, f"block {i}", 12)
        c.box(x + 15, 45, 110, 40, GREEN, "shared memory", 11)
    c.arrow(155, 58, 263, 58)
    c.arrow(263, 74, 157, 74)
    c.text(210, 50, "st.async", 11)
    c.note(210, 122, "parts of a sum meet without global memory")


@card(130)
def multicast(c):
    """Multicast: one read of L2 for several blocks"""
    c.box(20, 45, 80, 36, GREY, "tile in L2", 11)
    c.line(100, 63, 200, 63)
    c.arrow(200, 63, 286, 33)
    c.arrow(200, 63, 286, 93)
    c.box(290, 15, 110, 36, GREEN, "block 0", 11)
    c.box(290, 76, 110, 36, GREEN, "block 1", 11)
    c.note(150, 55, "one copy")


# ---- how work is cut ----


@card(90)
def epilogue(c):
    """Epilogue: what happens to sums before they are stored"""
    steps = [
        (GREY, "sums"),
        (BLUE, "+ bias"),
        (BLUE, "+ residual"),
        (ORANGE, "ReLU"),
        (GREEN, "round"),
        (GREY, "C"),
    ]
    for i, (fill, words) in enumerate(steps):
        c.box(12 + i * 67, 22, 58, 28, fill, words, 10)
        if i:
            c.arrow(4 + i * 67, 36, 11 + i * 67, 36)
    c.note(210, 74, "in registers: no pass over memory")


@card(125)
def split_k(c):
    """Split-K: several blocks share a tile's depth"""
    for i in range(4):
        c.box(20 + i * 55, 25, 55, 36, STAGES[i], f"block {i}", 11)
        c.arrow(47 + i * 55, 63, 296, 88, SOFT)
    c.note(130, 16, "the depth of one tile")
    c.box(300, 74, 100, 30, GREY, "sum, in order", 11)


@card(135)
def stream_k(c):
    """Stream-K: depths laid end to end, cut into equal shares"""
    for i in range(5):
        c.box(20 + i * 76, 22, 76, 24, WHITE, f"tile {i}", 11)
    for i in range(4):
        c.box(20 + i * 95, 62, 95, 28, STAGES[i], f"cluster {i}", 11)
    c.note(210, 116, "tiles whose share ends inside are summed up by a second kernel")


# ---- reductions ----


@card(150)
def online_softmax(c):
    """Online softmax: a larger value rescales the sum"""
    steps = [
        ("1", "1", "1"),
        ("3", "3", "1·e⁻² + 1"),
        ("2", "3", "… + e⁻¹"),
        ("5", "5", "…·e⁻² + 1"),
    ]
    for y, words in ((36, "x"), (72, "maximum"), (108, "sum")):
        c.text(74, y, words, 11, "end")
    for i, (x, maximum, total) in enumerate(steps):
        grows = i in (1, 3)
        c.box(84 + i * 82, 18, 70, 26, BLUE, x)
        c.box(84 + i * 82, 54, 70, 26, ORANGE if grows else WHITE, maximum)
        c.box(84 + i * 82, 90, 70, 26, ORANGE if grows else WHITE, total, 11)
    c.note(210, 138, "orange: a new maximum, for which the sum so far is rescaled")


@card(160)
def welford(c):
    """Welford: the mean moves with each value"""
    c.line(30, 50, 390, 50)
    for x, fill, words in ((120, GREY, "mean before"), (180, GREEN, "after"), (330, BLUE, "value")):
        c.box(x - 5, 40, 10, 20, fill)
        c.text(x, 30, words, 11)
    c.arrow(330, 74, 121, 74)
    c.note(226, 88, "difference to the mean before")
    c.arrow(330, 104, 181, 104)
    c.note(256, 118, "to the mean after")
    c.note(210, 146, "squares grow by their product; the mean moves by the first / count")


# ---- convolution ----


@card(165)
def im2col(c):
    """im2col: each patch becomes a row"""
    c.grid(25, 20, 6, 6, 17, lambda i, r: BLUE if 1 <= i < 4 and 1 <= r < 4 else WHITE)
    c.arrow(135, 62, 188, 62)
    c.grid(195, 30, 9, 5, 17, lambda i, r: BLUE if r == 2 else WHITE)
    c.note(76, 142, "image")
    c.note(272, 132, "a row for each output pixel,")
    c.note(272, 146, "a column for each tap and channel")
    c.text(370, 76, f"{TIMES} filters", 12, "middle")


@card(150)
def implicit_gemm(c):
    """Implicit GEMM: the patches' matrix is never stored"""
    c.grid(20, 20, 5, 5, 16, lambda i, r: BLUE if 1 <= i < 4 and r < 3 else WHITE)
    c.arrow(108, 58, 168, 58)
    c.note(138, 48, "address")
    c.box(172, 22, 80, 74, "none", "patches", 11, True)
    c.text(264, 62, TIMES, 14)
    c.box(278, 22, 48, 74, ORANGE, "filters", 11)
    c.text(338, 62, "=", 14)
    c.box(350, 22, 50, 74, GREEN, "result", 11)
    c.note(210, 128, "address of an element: from its row (pixel) and column (tap)")


@card(190)
def halo(c):
    """Halo: taps are shifted reads of one tile"""
    c.grid(20, 18, 8, 6, 15, lambda i, r: BLUE if i < 6 and 1 <= r < 5 and i > 0 else ORANGE)
    c.note(80, 126, "outputs, and their halo")
    for s in range(3):
        y = 22 + s * 34
        c.text(212, y + 14, f"tap {s}", 11, "end")
        c.grid(218, y, 12, 1, 15, lambda i, r, s=s: GREEN if s <= i < s + 9 else WHITE)
    c.note(308, 126, "the same pixels, from another one on")
    c.note(
        210,
        154,
        "the tile is one sequence of pixels in shared memory: tap (r, s) begins",
    )
    c.note(210, 170, "r · pitch + s further on, for all outputs alike")


@card(120)
def winograd(c):
    """Winograd: 16 products instead of 36"""
    c.grid(20, 22, 4, 4, 15, lambda i, r: BLUE)
    c.arrow(84, 52, 124, 52)
    c.note(104, 44, "Bᵀ d B")
    c.grid(130, 22, 4, 4, 15, lambda i, r: ORANGE)
    c.text(206, 58, "⊙", 16)
    c.grid(222, 22, 4, 4, 15, lambda i, r: PURPLE)
    c.arrow(286, 52, 330, 52)
    c.note(308, 44, "Aᵀ m A")
    c.grid(340, 37, 2, 2, 15, lambda i, r: GREEN)
    c.note(50, 104, "input")
    c.note(252, 104, "filter, transformed")
    c.note(355, 104, "2 x 2 outputs")


@card(185)
def moments(c):
    """Patch moments: statistics of every filter from one small matrix"""
    c.grid(
        20,
        20,
        7,
        7,
        14,
        lambda i, r: (
            BLUE if 1 <= i < 4 and 2 <= r < 5 else ORANGE if 4 <= i < 7 and r < 3 else WHITE
        ),
    )
    c.note(69, 136, "patches of the input")
    c.arrow(124, 68, 168, 68)
    c.row(174, 20, 13, 13, [(GREEN, "")] * 9)
    c.note(232, 15, "mean s")
    c.grid(174, 44, 9, 9, 10, lambda i, r: GREEN if i >= r else WHITE)
    c.note(219, 150, "covariance C")
    c.arrow(274, 90, 306, 90)
    c.text(312, 80, "mean = W·s", 12, "start")
    c.text(312, 102, "variance = WᵀCW", 11, "start")
    c.note(210, 174, "before any convolution has been computed")


# ---- launches ----


@card(130)
def pdl(c):
    """Programmatic dependent launch: the next kernel sets up early"""
    c.row(95, 16, 80, 26, [(GREY, "set-up"), (BLUE, "work")])
    c.text(88, 33, "kernel 1", 11, "end")
    c.box(195, 50, 60, 26, GREY, "set-up", 11)
    c.box(255, 50, 40, 26, WHITE, "wait", 11, True)
    c.box(295, 50, 95, 26, BLUE, "work", 11)
    c.text(88, 67, "kernel 2", 11, "end")
    c.line(255, 12, 255, 84, True)
    c.note(255, 98, "end of kernel 1")
    c.note(210, 120, "its blocks take what room there is, and wait before they read")


@card(150)
def cooperative_launch(c):
    """Cooperative launch: all blocks meet at a barrier of the grid"""
    for i, (first, second) in enumerate(((120, 110), (150, 110), (95, 110))):
        c.text(70, 33 + i * 32, f"block {i}", 11, "end")
        c.box(80, 16 + i * 32, first, 26, BLUE, "first pass", 11)
        c.box(80 + first, 16 + i * 32, 160 - first, 26, WHITE, "", 11, True)
        c.box(240, 16 + i * 32, second, 26, GREEN, "second pass", 11)
    c.line(240, 10, 240, 112, True)
    c.note(240, 124, "barrier of the grid")
    c.note(210, 142, "registers and shared memory keep what the first pass left there")


@card(165)
def cuda_graph(c):
    """CUDA graph: a chain and its branches"""
    names = ["forward", "loss", "dX₂", "dX₁", "update"]
    for i, name in enumerate(names):
        c.box(15 + i * 80, 60, 62, 28, BLUE, name, 11)
        if i:
            c.arrow(-2 + i * 80, 74, 14 + i * 80, 74)
    c.box(165, 108, 70, 26, GREEN, "dW₂", 11)
    c.box(248, 108, 70, 26, GREEN, "dW₁", 11)
    c.arrow(135, 88, 165, 112)
    c.arrow(225, 88, 258, 107)
    c.line(235, 121, 248, 121)
    c.arrow(318, 121, 350, 89)
    c.box(165, 14, 120, 26, ORANGE, "next batch, loss out", 11)
    c.arrow(130, 59, 164, 32)
    c.arrow(287, 27, 385, 27)
    c.box(388, 14, 20, 26, GREY, "end", 9)
    c.note(210, 154, "green: gradients that nothing needs before the update")


@card(120)
def stable_order(c):
    """Ordered sum: parts added in a fixed order"""
    for i in range(4):
        c.box(20 + i * 60, 20, 52, 26, STAGES[i], f"part {i}", 11)
        c.arrow(46 + i * 60, 48, 46 + i * 60, 70)
    c.row(20, 72, 60, 26, [(GREY, "p0"), (GREY, "+ p1"), (GREY, "+ p2"), (GREY, "+ p3")])
    c.note(340, 66, "the same bits")
    c.note(340, 80, "at every run")
