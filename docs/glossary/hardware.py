"""Drawings of the machine, its memory and what overlaps."""

from card import BLUE, GREEN, GREY, INK, ORANGE, RED, SOFT, STAGES, WHITE, card

# ---- the machine ----


@card(150)
def sm(c):
    """A multiprocessor: four partitions and the shared memory"""
    for i in range(4):
        x = 15 + i * 99
        c.box(x, 12, 93, 92, WHITE)
        c.text(x + 46, 27, f"partition {i}", 11, weight="bold")
        for j, (fill, words) in enumerate(
            [(GREY, "scheduler"), (ORANGE, "64 KiB registers"), (BLUE, "FMA | tensor core")]
        ):
            c.box(x + 4, 34 + j * 23, 85, 20, fill, words, 9)
    c.box(15, 110, 390, 28, GREEN, "shared memory and L1, 256 KiB on Hopper")


@card(105)
def warp(c):
    """A warp: one instruction, 32 lanes"""
    c.box(150, 10, 120, 22, GREY, "one instruction")
    for i in range(32):
        x = 18 + i * 12
        c.line(210, 32, x + 6, 54, colour="#aab4bf")
        c.box(x, 54, 12, 18, BLUE)
    c.note(18, 90, "lane 0", "start")
    c.note(402, 90, "lane 31", "end")


@card(130)
def warpgroup(c):
    """A warpgroup: four warps that multiply together"""
    for i in range(4):
        c.box(20, 15 + i * 25, 110, 22, STAGES[i], f"warp {i}")
        c.box(230, 15 + i * 25, 150, 22, STAGES[i], f"rows {16 * i} to {16 * i + 15}", 11)
        c.arrow(134, 26 + i * 25, 226, 26 + i * 25)
    c.note(75, 125, "128 threads")
    c.note(305, 125, "64 rows of the accumulator")


@card(140)
def occupancy(c):
    """Occupancy: warps that a multiprocessor holds"""
    for x, used, words in ((30, 64, "32 registers a thread"), (230, 16, "128 registers a thread")):
        c.grid(x, 14, 16, 4, 10, lambda i, r, used=used: BLUE if r * 16 + i < used else WHITE)
        c.note(x + 80, 72, words)
        c.text(x + 80, 92, f"{used} of 64 warps", weight="bold")
    c.note(210, 122, "few warps: each needs several loads in flight")


@card(170)
def roofline(c):
    """Roofline: what bandwidth and arithmetic allow"""
    c.arrow(50, 140, 400, 140)
    c.arrow(50, 140, 50, 12)
    c.line(50, 135, 200, 35)
    c.line(200, 35, 390, 35)
    c.text(112, 62, "bandwidth", 11)
    c.text(300, 28, "peak arithmetic", 11)
    for x, y, words in (
        (78, 118, "vector_add"),
        (330, 40, "matmul 4096³"),
        (155, 92, "small product"),
    ):
        c.parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{RED}" stroke="{INK}"/>')
        c.text(x + 9, y + 13, words, 11, "start" if x < 300 else "middle")
    c.note(230, 158, "operations per byte from memory")
    c.parts.append(
        f'<text x="20" y="80" font-size="11" fill="{SOFT}" text-anchor="middle" '
        'transform="rotate(-90 20 80)">operations per second</text>'
    )


# ---- memory ----


@card(150)
def coalescing(c):
    """Coalescing: neighbours read neighbours"""
    for y, step, words in (
        (14, 1, "4 sectors of 32 bytes for 32 lanes"),
        (82, 3, "a sector for each lane"),
    ):
        for i in range(8):
            c.box(30 + i * 15, y, 15, 15, BLUE)
            c.line(37 + i * 15, y + 15, 37 + i * 15 * step, y + 33, colour=SOFT)
        c.grid(
            30,
            y + 33,
            24,
            1,
            15,
            lambda i, r, s=step: ORANGE if i % s == 0 and i < 8 * s else WHITE,
        )
        c.text(400, y + 14, words, 11, "end")


@card(110)
def vectorised_load(c):
    """Vectorised load: 16 bytes an instruction"""
    for i in range(4):
        c.box(30 + i * 36, 18, 26, 20, GREY, "ld", 11)
        c.arrow(43 + i * 36, 38, 43 + i * 36, 60)
        c.box(30 + i * 36, 62, 26, 20, BLUE, "4 B", 10)
    c.box(230, 18, 160, 20, GREY, "ld.v4", 11)
    c.arrow(310, 38, 310, 60)
    c.row(230, 62, 40, 20, [(BLUE, "4 B")] * 4)
    c.note(100, 100, "four instructions")
    c.note(310, 100, "one, and 16 bytes in flight")


@card(160)
def shared_tile(c):
    """Shared memory tile: fetched once, used by the whole block"""
    c.box(20, 30, 80, 100)
    c.box(20, 62, 80, 28, BLUE, "A")
    c.box(120, 30, 90, 100)
    c.box(152, 30, 28, 100, ORANGE, "B")
    c.box(230, 30, 90, 100)
    c.box(262, 62, 28, 28, GREEN, "C")
    c.box(340, 42, 60, 26, BLUE, "tile of A", 11)
    c.box(340, 82, 60, 26, ORANGE, "tile of B", 11)
    c.note(370, 125, "shared memory")
    c.note(210, 150, "a tile of C needs a band of A and one of B, slice by slice")
    c.arrow(294, 76, 336, 76)


@card(165)
def bank_conflict(c):
    """Bank conflict: a column in one bank"""
    for x, pad, words in (
        (25, 0, "all of a column in one bank"),
        (230, 1, "a row one longer: all different"),
    ):
        c.grid(
            x,
            14,
            8,
            6,
            18,
            lambda i, r, p=pad: (
                RED if i == 2 and not p else GREEN if i == 2 else WHITE,
                str((i + r * p) % 8),
            ),
        )
        c.note(x + 72, 142, words)
    c.note(210, 158, "numbers: banks (8 of 32); coloured: what a warp reads at once")


@card(165)
def swizzle(c):
    """Swizzle: chunks permuted by the row's number"""
    for x, s, words in ((25, 0, "as it comes"), (230, 1, "chunk XOR row")):
        c.grid(
            x,
            14,
            8,
            6,
            18,
            lambda i, r, s=s: (ORANGE if (i ^ r * s) == 2 else WHITE, str(i ^ r * s)),
        )
        c.note(x + 72, 142, words)
    c.note(210, 158, "numbers: which 16 bytes of the row lie there")


@card(110)
def register_spill(c):
    """Register spill: values that do not fit"""
    c.box(20, 25, 250, 32, ORANGE, "255 registers of a thread")
    c.box(270, 25, 40, 32, RED, "12", 11)
    c.arrow(290, 60, 290, 82)
    c.box(200, 84, 180, 20, GREY, "local memory: L1, L2, DRAM", 11)
    c.note(290, 18, "too many")


@card(115)
def l2_promotion(c):
    """L2 promotion: how much a miss fetches"""
    c.box(20, 40, 90, 30, BLUE, "asks for 64 B", 11)
    c.arrow(114, 55, 156, 55)
    c.row(160, 40, 36, 30, [(BLUE, "32"), (BLUE, "32"), (ORANGE, "32"), (ORANGE, "32")])
    c.note(232, 30, "L2: 128 bytes come")
    c.arrow(350, 55, 308, 55)
    c.box(354, 40, 54, 30, GREY, "DRAM", 11)
    c.note(210, 98, "orange: fetched along, for the neighbour that will ask next")


@card(165)
def tile_order(c):
    """Tile order: blocks in flight share rows and columns"""
    for x, tall, words in ((25, 1, "row by row"), (230, 4, "in groups of 4 rows")):

        def cell(i, r, tall=tall):
            n = r // tall * 8 * tall + (i * tall + r % tall)
            return (BLUE if n < 12 else WHITE, str(n))

        c.grid(x, 14, 8, 4, 19, cell)
        c.note(x + 76, 108, words)
    c.note(112, 128, "12 tiles: 2 rows, 8 columns")
    c.note(306, 128, "12 tiles: 4 rows, 3 columns")
    c.note(210, 152, "blue: tiles in flight; less of A and B has to be in L2 at a time")


# ---- overlap ----


@card(125)
def double_buffering(c):
    """Double buffering: copy the next tile, multiply this one"""
    for i in range(5):
        c.box(80 + i * 62, 20, 60, 26, STAGES[i % 2], f"copy {i}", 11)
        if i < 4:
            c.box(142 + i * 62, 54, 60, 26, STAGES[i % 2], f"multiply {i}", 11)
    c.text(74, 37, "loads", 11, "end")
    c.text(74, 71, "products", 11, "end")
    c.arrow(80, 96, 400, 96)
    c.note(240, 114, "time; colours: the two stages of shared memory")


@card(125)
def cp_async(c):
    """cp.async: global to shared memory, past the registers"""
    c.box(15, 45, 90, 30, GREY, "global memory", 10)
    c.box(165, 15, 90, 28, ORANGE, "registers", 11)
    c.box(315, 45, 95, 30, GREEN, "shared memory", 10)
    c.arrow(105, 52, 163, 32, SOFT)
    c.arrow(257, 32, 313, 52, SOFT)
    c.arrow(107, 64, 313, 64)
    c.text(210, 80, "cp.async", 12, weight="bold")
    c.note(210, 108, "the thread goes on; it waits for the group when it needs the tile")


@card(160)
def tma(c):
    """TMA: one thread asks for a box of a tensor"""
    c.box(15, 20, 85, 26, GREY, "one thread", 11)
    c.arrow(100, 33, 138, 33)
    c.box(140, 14, 90, 38, ORANGE, "copy engine", 11)
    c.note(185, 66, "+ tensor map")
    c.grid(255, 18, 7, 6, 15, lambda i, r: BLUE if i >= 4 and r < 4 else WHITE)
    c.box(315, 18, 60, 60, "none", line=RED)
    c.box(360, 18, 15, 60, "#ffffff", "0", 10, True)
    c.note(310, 124, "outside: zeros")
    c.grid(60, 92, 4, 3, 15, lambda i, r: (BLUE, "") if i < 3 else (WHITE, "0"))
    c.note(90, 152, "shared memory, swizzled")
    c.arrow(185, 70, 125, 112)
    c.arrow(253, 40, 232, 40)


@card(140)
def mbarrier(c):
    """mbarriers: full and empty, for each stage"""
    c.box(20, 45, 95, 40, ORANGE, "producer")
    c.box(305, 45, 95, 40, BLUE, "consumers")
    c.box(165, 15, 90, 26, GREEN, "full[stage]", 11)
    c.box(165, 92, 90, 26, GREY, "empty[stage]", 11)
    c.arrow(92, 43, 163, 28)
    c.arrow(257, 28, 328, 43)
    c.arrow(328, 87, 257, 105)
    c.arrow(163, 105, 92, 87)
    c.note(75, 25, "bytes arrive")
    c.note(350, 25, "wait")
    c.note(350, 112, "has been read")
    c.note(75, 112, "wait")


@card(135)
def setmaxnreg(c):
    """setmaxnreg: registers go where the sums are"""
    for y, widths, words in (
        (18, (168, 168, 168), "at launch"),
        (72, (40, 232, 232), "afterwards"),
    ):
        x = 85
        c.text(78, y + 19, words, 11, "end")
        for w, fill in zip(widths, (ORANGE, BLUE, GREEN), strict=True):
            c.box(x, y, w * 0.62, 28, fill, str(w), 11)
            x += w * 0.62
    c.note(240, 62, "producer, consumer, consumer: registers a thread")
    c.note(240, 122, "the producer hardly needs any; 504 in all both times")


@card(140)
def persistent_kernel(c):
    """Persistent kernel: a block stays for many tiles"""
    for i in range(3):
        c.row(85 + i * 105, 18, 32, 24, [(GREY, "start"), (BLUE, f"tile {i}"), (ORANGE, "store")])
    c.text(80, 34, "a block each", 11, "end")
    c.row(85, 68, 32, 24, [(GREY, "start"), (BLUE, "tile 0"), (BLUE, "tile 1"), (BLUE, "tile 2")])
    c.row(149, 94, 32, 20, [(ORANGE, "store"), (ORANGE, "store"), (ORANGE, "store")])
    c.text(80, 84, "one block", 11, "end")
    c.note(320, 84, "stores hide behind", "middle")
    c.note(320, 98, "the next tile's products", "middle")
    c.note(210, 132, "time")
