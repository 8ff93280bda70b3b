"""What the ranks of the process tests run."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from meshc.__main__ import main
from meshc.cost import microbenchmarks
from meshc.errors import PeerError
from meshc.runtime.comm import collectives, rows
from meshc.runtime.comm.groups import Groups
from meshc.runtime.comm.halo_exchange import HaloExchange
from meshc.runtime.failure import watch
from meshc.runtime.failure.failed_rank import FailureBoard, world_board
from meshc.runtime.run import link_times


def command(folder: str, *words: str) -> None:
    """`python -m meshc WORDS` in this folder."""
    os.chdir(folder)
    sys.exit(main([*words]))


def calibrated(path: str) -> None:
    """`meshc calibrate`, which measures little: two sizes so far apart that the larger takes longer on any machine, however busy."""
    microbenchmarks.BATCH_S, microbenchmarks.SQUARES, microbenchmarks.VECTORS = 1e-4, {"cpu": (64, 128)}, {"cpu": (1 << 16, 1 << 18)}
    microbenchmarks.THIN = {"cpu": ((8, 128, 128),)}
    link_times.SIZES, link_times.BESIDE, link_times.AFTER = (1 << 10, 1 << 25), (1 << 18,), (1e-4,)
    sys.exit(main(["calibrate", "--device", "cpu", "--out", path]))


MOVED = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
]
REDUCED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]


def sample(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers that every dtype holds, different on every rank, and whose sums are exact."""
    draws = torch.randint(0, 8, shape, generator=torch.Generator().manual_seed(rank))
    return draws.bool() if dtype is torch.bool else draws.to(dtype)


def same(got: Tensor, want: Tensor, what: str) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, (what, got.dtype, got.shape, want.dtype, want.shape)
    assert got.is_contiguous(), (what, got.stride())
    assert torch.equal(got.contiguous().view(-1).view(torch.uint8), want.contiguous().view(-1).view(torch.uint8)), (what, got, want)


def reduce(terms: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(terms)
    return {"sum": lambda: stacked.sum(0, dtype=stacked.dtype), "max": lambda: stacked.amax(0), "min": lambda: stacked.amin(0)}[op]()


WINDOWS = [  # size of the dim, [size of the other, stride, offset, length] as one rank would have it
    (16, (16, 1, -1, 3)),  # a convolution of kernel 3
    (7, (4, 2, -1, 3)),
    (5, (5, 1, -3, 4)),  # causal; over four ranks from several neighbours
    (3, (5, 1, -2, 5)),  # more ranks than tiles
    (9, (3, 3, 0, 1)),  # gaps
    (8, (8, 1, 0, 1)),  # nothing moves
]


def halos(group: dist.ProcessGroup) -> None:
    """Windows of a dim that lies in ceil-tiles, and sums over windows, against the whole dim."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for (size, (other, stride, offset, span)), dim in itertools.product(WINDOWS, range(3)):
        tile, step = -(-size // ranks), -(-other // ranks)
        window = [other, stride, offset, (step - 1) * stride + span]
        starts = [place * step * stride + offset for place in range(ranks)]
        exchange = HaloExchange(size, window, [ranks], group)
        shape = [2, 3, 2]
        shape[dim] = size
        for dtype in (torch.float32, torch.bfloat16, torch.int16):
            whole = sample(9, tuple(shape), dtype)
            shape[dim] = tile
            mine = torch.full(shape, 77, dtype=dtype)  # what is padding must not be read
            real = whole.narrow(dim, min(rank * tile, size), max(0, min(tile, size - rank * tile)))
            mine.narrow(dim, 0, real.shape[dim]).copy_(real)
            indices = range(starts[rank], starts[rank] + window[3])
            read = [whole.select(dim, i) if 0 <= i < size else torch.full_like(whole.select(dim, 0), 5) for i in indices]
            same(exchange.windows(mine, dim, 5).wait(), torch.stack(read, dim), f"halo {size} {window} {dim} {dtype}")
            shape[dim] = window[3]
            terms = [sample(place, tuple(shape), dtype) for place in range(ranks)]
            total = torch.zeros_like(mine)
            for place, index in itertools.product(range(ranks), range(window[3])):
                at = starts[place] + index
                if at // tile == rank and at < size:
                    total.select(dim, at % tile).add_(terms[place].select(dim, index))
            same(exchange.tiles(terms[rank], dim).wait(), total, f"halo_sum {size} {window} {dim} {dtype}")
            shape[dim] = size


def rows_that_are_chosen(group: dist.ProcessGroup) -> None:
    """Three choices a rank, against all rows with zeros in place of those without one: several a row, all of one rank, none, no rows."""
    rank, size = group.rank(), group.size()
    drawn = torch.randint(0, 3 * size, (size * 5, 2), generator=torch.Generator().manual_seed(7))
    for choice in (drawn, torch.ones(size * 5, 1, dtype=torch.int64), torch.full((size * 5, 2), -1), drawn[:0].int()):
        here = [torch.tensor([any(one // 3 == place for one in row) for row in choice.tolist()], dtype=torch.bool) for place in range(size)]
        tokens = len(choice) // size
        for dtype in (torch.float64, torch.bfloat16):
            given = [sample(place, (tokens, 4), dtype) for place in range(size)]
            wanted = torch.cat(given) * here[rank].unsqueeze(1)
            same(rows.gather(given[rank], choice, each=3, group=group).wait(), wanted.unsqueeze(0), f"gather_rows {dtype}")
            told = [sample(place, (1, size * tokens, 4), dtype) for place in range(size)]
            total = sum(one[0] * mask.unsqueeze(1) for one, mask in zip(told, here, strict=True))
            assert isinstance(total, Tensor)
            wanted = total[rank * tokens : (rank + 1) * tokens].contiguous()
            same(rows.scatter(told[rank], choice, each=3, group=group).wait(), wanted, f"scatter_rows {dtype}")
            blocks_of_rows(group, choice, here, given, told)
        rounded = [sample(place, (tokens, 4), torch.float32).to(torch.float8_e4m3fn) for place in range(size)]
        wanted = torch.where(here[rank].unsqueeze(1), torch.cat(rounded), 0.0).unsqueeze(0)
        same(rows.gather(rounded[rank], choice, each=3, group=group).wait(), wanted, "gather_rows of 8-bit floats")
        choice.fill_(-1)  # what was found of it counts no more
        nothing = rows.gather(given[rank], choice, each=3, group=group).wait()
        same(nothing, torch.zeros_like(nothing), "gather_rows of choices that were written")


def blocks_of_rows(
    group: dist.ProcessGroup, choice: Tensor, here: list[Tensor], given: list[Tensor], told: list[Tensor]
) -> None:
    """The same twice, in two blocks: of rows as they are, and in the opposite order of ranks and rows."""
    rank, size = group.rank(), group.size()
    twice = torch.stack([choice, choice.flip(0)])
    there = torch.stack([here[rank], here[rank].flip(0)]).unsqueeze(-1)
    whole = torch.cat(given)
    wanted = torch.stack([whole, whole.flip(0)]) * there
    mine = torch.stack([given[rank], given[size - 1 - rank].flip(0)])
    same(rows.gather(mine, twice, each=3, group=group).wait(), wanted.unsqueeze(0), "gather_rows of two blocks")
    total = sum(one[0] * mask.unsqueeze(1) for one, mask in zip(told, here, strict=True))
    assert isinstance(total, Tensor)
    wanted = torch.stack([total, total.flip(0)]).chunk(size, 1)[rank].contiguous()
    both = torch.stack([told[rank][0], told[rank][0].flip(0)]).unsqueeze(0)
    same(rows.scatter(both, twice, each=3, group=group).wait(), wanted, "scatter_rows of two blocks")


def every_collective() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None

    def all_samples(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        return [sample(place, shape, dtype) for place in range(size)]

    shape = (4, 8, 12)
    for dtype in MOVED:
        xs = all_samples(shape, dtype)
        x = xs[rank]
        same(collectives.all_gather(x, world).wait(), torch.cat(xs), f"all_gather {dtype}")
        same(collectives.broadcast(x.clone(), world, 1).wait(), xs[1], f"broadcast {dtype}")
        for steps in range(1, size):
            shifted = collectives.ring_shift(x.transpose(0, 1), steps, world).wait()
            same(shifted, xs[(rank - steps) % size].transpose(0, 1), f"ring_shift {steps} {dtype} of a transposed view")
        successor, predecessor = (rank + 1) % size, (rank - 1) % size
        received = collectives.recv(torch.empty_like(x), world, predecessor)
        sent = collectives.send(x, world, successor)
        same(received.wait(), xs[predecessor], f"send and recv {dtype}")
        same(sent.wait(), x, f"send {dtype}")
        for dim in range(-1, 3):
            same(collectives.gather_dim(x, dim, world).wait(), torch.cat(xs, dim), f"gather_dim {dim} {dtype}")
            turned = collectives.gather_dim(x.transpose(0, 2), dim, world).wait()
            same(turned, torch.cat([other.transpose(0, 2) for other in xs], dim), f"gather_dim {dim} {dtype} of a transposed view")
        for split, concat in itertools.product(range(-1, 3), range(-1, 3)):
            want = torch.cat([other.chunk(size, split)[rank] for other in xs], concat)
            same(collectives.all_to_all_dims(x, split, concat, world).wait(), want, f"all_to_all_dims {split} {concat} {dtype}")

    halos(world)
    rows_that_are_chosen(world)
    for dtype, op in itertools.product(REDUCED, ("sum", "max", "min")):
        for shape in ((4, 8, 12), (4, 128, 256), (0, 4, 4)):  # an exchange, a ring for 32-bit numbers and above, nothing
            xs = all_samples(shape, dtype)
            x, want = xs[rank], reduce(xs, op)
            same(collectives.all_reduce(x, world, op).wait(), want, f"all_reduce {op} {dtype}")
            same(x, sample(rank, shape, dtype), "the input of all_reduce")
            mine = x.clone()
            same(collectives.all_reduce(mine, world, op, out=mine).wait(), want, f"all_reduce in place {op} {dtype}")
            same(mine, want, f"the tensor of all_reduce in place {op} {dtype}")
            out = torch.empty_like(x)
            collectives.all_reduce(x, world, op, out=out).wait()
            same(out, want, f"all_reduce with out {op} {dtype}")
            for dim in range(-1, 3):
                part = collectives.scatter_dim(x, dim, world, op).wait()
                same(part, want.chunk(size, dim)[rank], f"scatter_dim {dim} {op} {dtype}")
            same(x, sample(rank, shape, dtype), "the input of the reduce-scatters")
    scalars = [torch.tensor(float(place)) for place in range(size)]
    same(collectives.all_reduce(scalars[rank], world).wait(), reduce(scalars, "sum"), "all_reduce of a scalar")
    bools = all_samples((5,), torch.bool)
    same(collectives.all_reduce(bools[rank], world, "max").wait(), torch.stack(bools).any(0), "any")
    same(collectives.all_reduce(bools[rank], world, "min").wait(), torch.stack(bools).all(0), "all")

    # Many at once, waited for in another order.
    xs = all_samples((64, 64), torch.float32)
    works = [collectives.gather_dim(xs[rank] + i, i % 2, world) for i in range(6)]
    works += [collectives.scatter_dim(xs[rank] + i, i % 2, world) for i in range(6)]
    works += [collectives.all_reduce(xs[rank] + i, world) for i in range(6)]
    for i in reversed(range(6)):
        summed = reduce([other + i for other in xs], "sum")
        same(works[12 + i].wait(), summed, "all_reduce among others")
        same(works[6 + i].wait(), summed.chunk(size, i % 2)[rank], "scatter_dim among others")
        same(works[i].wait(), torch.cat([other + i for other in xs], i % 2), "gather_dim among others")
        same(works[i].wait(), torch.cat([other + i for other in xs], i % 2), "gather_dim, waited for again")

    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: collectives.scatter_dim(torch.ones(3, size + 1), 1, world), f"dim 1 of shape (3, {size + 1}) does not split into {size}"),
        (lambda: collectives.all_reduce(torch.ones(2, dtype=torch.bool), world), "bool takes max and min"),
        (lambda: collectives.recv(torch.ones(2, 3).t(), world, 0), "is not contiguous"),
    ]
    for call, text in refused:
        try:
            call()
        except (TypeError, ValueError) as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    dist.destroy_process_group()
    print("done")


def groups_of_a_mesh() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = Groups({"dp": 2, "one": 1, "tp": 2}, rank, 4, mesh)
    groups.prepare([("dp",), ("tp",), ("dp", "tp"), ("tp", "dp"), ("one",), ("tp", "one")])
    assert groups.group(("dp", "tp")) is groups.world and groups.group(("tp", "one")) is groups.group(("tp",))
    assert groups.group(("one",)) is None
    mine = [groups.world, *(groups.group(axes) for axes in (("dp",), ("tp",), ("tp", "dp")))]
    assert len(set(map(id, mine))) == 4
    theirs = [dist.group.WORLD, mesh.get_group("dp"), mesh.get_group("tp")]
    assert not any(group is other for group in mine for other in theirs), "a thread of the user's may send on these"
    again = Groups({"dp": 2, "tp": 2}, rank, 4, mesh)
    again.prepare([("tp",)])
    assert again.world is groups.world and again.group(("tp",)) is groups.group(("tp",))
    places = torch.tensor([float(rank)])
    for axes, want in {
        ("dp",): [rank % 2, rank % 2 + 2],
        ("tp",): [rank // 2 * 2, rank // 2 * 2 + 1],
        ("dp", "tp"): [0, 1, 2, 3],
        ("tp", "dp"): [0, 2, 1, 3],
    }.items():
        got = collectives.all_gather(places, groups.group(axes)).wait().tolist()
        assert got == want and want in groups.members(axes), (axes, got, want)
        whole = collectives.gather_dim(torch.full((2, 1), float(rank)), 1, groups.group(axes)).wait()
        assert whole.tolist() == [want, want], (axes, whole)
    try:
        groups.group(("pp",))
    except Exception as error:  # noqa: BLE001 - its text is what matters
        assert "no group over the axes ('pp',)" in str(error), error
    # A mesh whose ranks are in another order, without a DeviceMesh.
    turned = Groups({"dp": 2, "tp": 2}, rank, 4, rank_of=torch.tensor([[1, 0], [2, 3]]))
    turned.prepare([("tp",), ("dp",)])
    got = collectives.all_gather(places, turned.group(("tp",))).wait().tolist()
    assert got == ([1, 0] if rank < 2 else [2, 3]), got
    # Nobody in a group of one.
    x = torch.arange(6.0).view(2, 3)
    assert collectives.all_reduce(x, None).wait() is x and collectives.scatter_dim(x, 1, None).wait() is x
    assert collectives.ring_shift(x, 1, None).wait() is x
    assert collectives.gather_dim(x, 1, None).wait() is x and collectives.all_to_all_dims(x, 0, 1, None).wait() is x
    dist.destroy_process_group()
    print("done")


def messages_on_three_ranks() -> None:
    """Several at once between the same ranks, in the order sent; the one in the middle of an exchange of halves has its own."""
    dist.init_process_group("gloo")
    world, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), float(rank))
    with torch.no_grad():
        on_their_way = [collectives.ring_shift(x + 10 * number, 1, world) for number in range(3)]
        tile = torch.arange(rank * 3.0, rank * 3.0 + 3).repeat(2, 1)
        order, nothing = collectives.exchange_halves(tile, 1, world, home=False), collectives.ring_shift(x[:0], 1, world)
        for number, work in enumerate(on_their_way):
            same(work.wait(), torch.full((4,), (rank - 1) % size + 10.0 * number), f"message {number}")
        same(order.wait(), torch.tensor([[0.0, 1.0, 8.0], [3.0, 4.0, 5.0], [2.0, 6.0, 7.0]][rank]).repeat(2, 1), "zigzag order")
        same(collectives.exchange_halves(order.wait(), 1, world, home=True).wait(), tile, "natural order")
        same(nothing.wait(), x[:0], "nothing")
    dist.destroy_process_group()
    print("done")


def _board(store: str) -> FailureBoard:
    if store == "env":
        dist.init_process_group("gloo")
    else:
        world_size = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=int(os.environ["RANK"]), world_size=world_size)
    return world_board()


SHORT_S = 3.0
"""What these tests wait for instead of thirty seconds of silence and five of grace."""


def steps(store: str, deed: str, culprit: str) -> None:
    """Eight steps of two all-reduces over dp and one over tp; in step 5 the culprit does the deed."""
    if deed == "freeze":
        watch.SILENT_S, watch.SILENT_END_S = SHORT_S / 2, SHORT_S
    board = _board(store)
    size = dist.get_world_size()
    groups = Groups({"dp": size // 2, "tp": 2}, board.rank, size)
    groups.prepare([("dp",), ("tp",)])
    board.groups += [group for group in (groups.world, groups.group(("dp",)), groups.group(("tp",))) if group is not None]
    x = torch.ones(1000, 300)  # beyond the exchange: a ring over one axis ...
    for step in range(8):
        with board.guard(step, "all_reduce(dp)"):
            collectives.all_reduce(x, groups.group(("dp",)), "max").wait()
            if step == 5 and board.rank == int(culprit):
                _do(deed)
            board.instruction = "all_reduce(tp)"
            collectives.all_reduce(x, groups.group(("tp",)), "max").wait()
            board.instruction = "all_gather(dp)"
            collectives.all_gather(x[0], groups.group(("dp",))).wait()  # ... and messages over another
    print("finished", flush=True)


def _do(deed: str) -> None:
    if deed == "raise":
        raise ValueError("the planted error")
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "freeze":
        subprocess.Popen(["sh", "-c", f"sleep 12; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if deed == "leave":
        sys.exit(0)


def raises_between_steps() -> None:
    """Rank 1 raises outside of any guard, after one step; the others wait for it in the next."""
    board = _board("env")
    with board.guard(0, "barrier"):
        collectives.all_reduce(torch.ones(1), dist.group.WORLD).wait()
    if board.rank == 1:
        raise ValueError("the planted error")
    with board.guard(1, "barrier"):
        collectives.all_reduce(torch.ones(1), dist.group.WORLD).wait()


def leaves_early(store: str) -> None:
    """Rank 0 is done after one step, without a word to torch; the others, which need it no more, go on for longer than silence lasts."""
    watch.SILENT_S, watch.SILENT_END_S = SHORT_S / 2, SHORT_S
    board = _board(store)
    rest = dist.new_group(list(range(1, dist.get_world_size())))
    with board.guard(0, "all_reduce"):
        collectives.all_reduce(torch.ones(1), dist.group.WORLD).wait()
    if board.rank == 0:
        return
    board.groups.append(rest)
    end = time.monotonic() + SHORT_S + 2
    done = torch.zeros(1)
    while not done:
        with board.guard(1, "all_reduce"):
            # All of them stop in the same round.
            done = collectives.all_reduce(torch.tensor([float(time.monotonic() > end)]), rest, "max").wait()
        time.sleep(0.2)
    print("finished", flush=True)


def waits_for_one_that_raised() -> None:
    """Rank 1 raises and then hangs, with all its connections open; rank 0 waits for it by a message, rank 2 for rank 3 by a ring."""
    board = _board("env")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    board.groups = [pairs[board.rank // 2]]
    start = time.monotonic()
    try:
        with board.guard(3, "stage 1"):
            if board.rank == 0:
                collectives.recv(torch.empty(4), pairs[0], 1).wait()
            elif board.rank == 1:
                time.sleep(1)
                board.groups = []  # so that nothing but the post tells the others
                raise ValueError("the planted error")
            elif board.rank == 2:
                collectives.all_reduce(torch.ones(1000, 1000), pairs[1]).wait()
            else:
                time.sleep(6)
    except PeerError as error:
        assert time.monotonic() - start < 5 or board.rank == 3, time.monotonic() - start
        print(f"PeerError: {error}", flush=True)
    except ValueError:
        time.sleep(6)


def whose_store_stands_still() -> None:
    """Rank 1 comes to its first line of meshc when the process of rank 0, which serves the store, has been stopped already."""
    watch.SILENT_S, watch.SILENT_END_S = 2.0, 4.0
    reader, writer = os.pipe()
    server = os.fork()
    if server == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True)
        os.write(writer, str(store.port).encode())
        threading.Event().wait()
    store = dist.TCPStore("127.0.0.1", int(os.read(reader, 16)), None, False)
    os.kill(server, signal.SIGSTOP)
    after = subprocess.Popen(["sh", "-c", f"sleep 15; kill -KILL {server}"], start_new_session=True)
    try:
        board = FailureBoard(dist.PrefixStore("meshc", store), rank=1, world_size=2)
        print("came", flush=True)
        while True:
            board.check()
            time.sleep(0.01)
    finally:
        print("the server stood still" if after.poll() is None else "the server had gone", flush=True)
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        after.kill()
        after.wait()


def does_not_come_back() -> None:
    """Rank 1 raises; rank 0 is deaf, in a computation that never ends, so its watcher ends it."""
    watch.GRACE_S = SHORT_S
    board = _board("env")
    with board.guard(2, "stage 0"):
        collectives.all_reduce(torch.ones(1), dist.group.WORLD).wait()  # both are here
        if board.rank == 1:
            raise ValueError("the planted error")
        threading.Event().wait()
