"""Captured stages give what plain stages give: any rows, any prompt, absent cameras, in any order. On the CPU everything runs
but the capture itself; ``recipes/gpu/pi0_speed.py`` compares on a GPU."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from models.vla import tiny
from models.vla.test_serving import FAMILIES, actions, build, joined, serve
from realtime_omni.engine import commands as c
from realtime_omni.models.common.vla import graphs as captured
from realtime_omni.models.common.vla.attention import PrefixKV
from realtime_omni.models.common.vla.decoder import gelu
from realtime_omni.models.common.vla.flow import Velocity
from realtime_omni.models.common.vla.graphs import GraphStages, biased, compile_layers, fuse, masked, open_stages
from realtime_omni.models.common.vla.network import FlowNetwork, PolicyInputs, encode, picture_features, sample
from realtime_omni.models.common.vla.stages import Stages
from realtime_omni.session.values import SessionId

CPU = torch.device("cpu")


@pytest.fixture(params=tiny.FAMILIES)
def network(request: pytest.FixtureRequest) -> FlowNetwork:
    return tiny.network(request.param)


@pytest.fixture
def graphs(network: FlowNetwork) -> GraphStages:
    return GraphStages(network, CPU, cameras=tiny.CAMERAS)


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


def prefixes(stages: Stages, rows: list[PolicyInputs]) -> list[PrefixKV]:
    with torch.no_grad():
        inputs = PolicyInputs.stack(rows)
        return stages.prefixes(picture_features(stages.network, inputs), inputs)


def velocity(stages: Stages, rows: list[PolicyInputs], kvs: list[PrefixKV] | None = None) -> Velocity:
    return stages.velocity(kvs or prefixes(stages, rows), [row.state[0] for row in rows])


ROWS = [tiny.row(1, words=3), tiny.row(2, (True, False, False), words=11), tiny.row(3, (False, True, True), words=29)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_pictures_fill_up_to_the_next_size(graphs: GraphStages, count: int) -> None:
    images = torch.rand(count, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        assert gap(graphs.features(images), graphs.network.embed_images(images)) <= 1e-6
        raw = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8)
        signed = raw.permute(0, 3, 1, 2).float() / 255 * 2 - 1
        assert gap(graphs.features(raw), graphs.network.embed_images(signed)) <= 1e-6


@pytest.mark.parametrize("count", [1, 3])
def test_prefixes_of_any_length_are_the_plain_ones(graphs: GraphStages, count: int) -> None:
    plain = prefixes(Stages(graphs.network, CPU), ROWS[:count])
    for ours, theirs in zip(prefixes(graphs, ROWS[:count]), plain, strict=True):
        assert gap(ours.keys, theirs.keys) <= 1e-5
        assert gap(ours.values, theirs.values) <= 1e-5
        assert torch.equal(ours.mask, theirs.mask)


def test_a_longer_prompt_leaves_nothing_behind_for_a_shorter_one(graphs: GraphStages) -> None:
    first = prefixes(graphs, ROWS[:1])[0]
    prefixes(graphs, [tiny.row(7, words=14)])
    assert torch.equal(prefixes(graphs, ROWS[:1])[0].keys, first.keys)


@pytest.mark.parametrize("per_action", [False, True])
def test_a_step_of_any_rows_is_the_plain_step(graphs: GraphStages, per_action: bool) -> None:
    """Rows change between steps as they do when sessions join and leave; times differ per row, or per action."""
    plain = Stages(graphs.network, CPU)
    kvs = prefixes(plain, ROWS)
    for chosen in ([0, 1, 2], [2], [1, 2], [0], [0, 1, 2]):
        rows, x = [ROWS[i] for i in chosen], tiny.noise(len(chosen), seed=chosen[0])
        t = torch.rand(len(chosen), *([tiny.HORIZON] if per_action else []))
        with torch.no_grad():
            ours = velocity(graphs, rows, [kvs[i] for i in chosen])(x, t)
            theirs = velocity(plain, rows, [kvs[i] for i in chosen])(x, t)
        assert gap(ours, theirs) <= 1e-5


def test_a_step_with_the_fused_kernel_is_the_plain_step(graphs: GraphStages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "FUSED_ROWS", 1)
    plain, x, t = Stages(graphs.network, CPU), tiny.noise(3, seed=1), torch.rand(3)
    kvs = prefixes(plain, ROWS)
    with torch.no_grad():
        assert gap(velocity(graphs, ROWS, kvs)(x, t), velocity(plain, ROWS, kvs)(x, t)) <= 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_both_fused_kernels_are_one_function() -> None:
    """Two key heads, ten queries each, keys that are not there."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, 2, tokens, 16, generator=generator) for tokens in (10, 7, 7))
    bias = torch.zeros(3, 1, 7).masked_fill_(torch.arange(7) >= torch.tensor([7, 4, 1])[:, None, None], -torch.inf)
    assert gap(biased(q, k, v, bias), masked(q, k, v, bias)) <= 1e-6


@pytest.mark.parametrize("fused", [1, 16])
def test_a_state_that_comes_with_the_first_step_is_the_one_that_came_before(
    fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64: whole chunks over prefixes of three lengths, and a robot that joins when the others have taken a step."""
    monkeypatch.setattr(captured, "FUSED_ROWS", fused)
    network = tiny.network("pi0").double()
    graphs, plain = GraphStages(network, CPU, cameras=tiny.CAMERAS), Stages(network, CPU)
    rows = [replace(row, images=row.images.double(), state=row.state.double()) for row in ROWS]
    kvs = prefixes(plain, rows)
    xs = [tiny.noise(3, seed=4).double()] * 2
    with torch.no_grad():
        for step, chosen in enumerate(([0, 1], [0, 1, 2], [0, 1, 2], [2])):
            t = torch.full((len(chosen),), 1 - step / 4, dtype=torch.float64)
            for way, stages in enumerate((graphs, plain)):
                v = velocity(stages, [rows[i] for i in chosen], [kvs[i] for i in chosen])(xs[way][chosen], t)
                xs[way] = xs[way].index_add(0, torch.tensor(chosen), v.double(), alpha=-0.25)
    assert gap(*xs) <= 1e-6


def test_two_groups_take_turns_on_one_graph(graphs: GraphStages) -> None:
    plain, x, t = Stages(graphs.network, CPU), tiny.noise(), torch.tensor([0.7])
    ours = [velocity(graphs, [row]) for row in ROWS[:2]]
    theirs = [velocity(plain, [row]) for row in ROWS[:2]]
    with torch.no_grad():
        for index in (0, 1, 0, 1):
            assert gap(ours[index](x, t), theirs[index](x, t)) <= 1e-5


def test_a_new_state_over_the_same_prefix_is_seen(graphs: GraphStages) -> None:
    plain, kvs, x, t = Stages(graphs.network, CPU), prefixes(graphs, ROWS[:1]), tiny.noise(), torch.tensor([0.7])
    for state in (ROWS[0].state[0], ROWS[1].state[0]):
        with torch.no_grad():
            assert gap(graphs.velocity(kvs, [state])(x, t), plain.velocity(kvs, [state])(x, t)) <= 1e-5


def test_a_step_under_gradients_runs_plainly(graphs: GraphStages) -> None:
    """What a guided step with the true Jacobian asks for."""
    x, t = tiny.noise().requires_grad_(), torch.tensor([0.7])
    with torch.no_grad():
        step = velocity(graphs, ROWS[:1])
        without = step(x, t)
    v = step(x, t)
    assert gap(v, without) <= 1e-5
    (gradient,) = torch.autograd.grad(v.sum(), x)
    assert float(gradient.abs().max()) > 0


def test_a_compiled_gelu_is_the_same_function() -> None:
    x = torch.linspace(-9, 9, 1001)
    compiled = torch.compile(gelu, backend="eager", fullgraph=True)
    assert gap(compiled(x), functional.gelu(x, approximate="tanh")) <= 1e-6


def test_a_size_that_cannot_be_captured_runs_plainly(
    network: FlowNetwork, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(work: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = GraphStages(network, CPU, cameras=tiny.CAMERAS)
    monkeypatch.setattr(graphs, "_capture", fails)
    plain = Stages(network, CPU)
    x, t = tiny.noise(), torch.tensor([0.7])
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(velocity(graphs, ROWS[:1])(x, t), velocity(plain, ROWS[:1])(x, t))
    assert sum("runs plainly" in record.message for record in caplog.records) == 2  # a prefix and a step, once each
    assert [key[0] for key in graphs.without_graph] == ["prefix", "step"]  # type: ignore[index]


def test_graphs_keep_nobodys_prefix_alive(graphs: GraphStages) -> None:
    kvs = prefixes(graphs, ROWS[:1])
    with torch.no_grad():
        velocity(graphs, ROWS[:1], kvs)(tiny.noise(), torch.tensor([0.7]))
    held = weakref.ref(kvs[0])
    del kvs
    gc.collect()
    assert held() is None


def test_fused_projections_are_the_same_network(network: FlowNetwork) -> None:
    plain = sample(network, encode(network, ROWS[1]), tiny.noise())
    weights = {name: value.clone() for name, value in network.state_dict().items()}  # type: ignore[attr-defined]
    fuse(network)
    assert gap(sample(network, encode(network, ROWS[1]), tiny.noise()), plain) <= 1e-5
    for name, value in network.state_dict().items():  # type: ignore[attr-defined]
        assert torch.equal(value, weights[name])
    for module in network.modules():  # type: ignore[attr-defined]
        if getattr(module, "mlp_weight", None) is not None:
            assert module.gate.weight.data_ptr() == module.mlp_weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_gets_scores_that_it_can_compute(dtype: torch.dtype) -> None:
    """Shapes and rules of a GPU's operations, without one."""
    with FakeTensorMode():
        q = torch.empty(2, 3, 8, dtype=dtype, device="cuda")
        scores = captured._scores(q, q)
    assert scores.shape == (2, 3, 3)
    assert scores.dtype == torch.promote_types(dtype, torch.float32)


def test_warming_up_makes_every_graph_that_so_many_robots_need(
    graphs: GraphStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs.warm_up(2)
    made = len(graphs._graphs)
    monkeypatch.setattr(
        graphs,
        "_graph",
        lambda key, make: pytest.fail(f"{key} was not there") if key not in graphs._graphs else graphs._graphs[key],
    )
    for rows in (ROWS[:1], ROWS[:2]):
        raw = torch.zeros(3 * len(rows), 32, 32, 3, dtype=torch.uint8)
        with torch.no_grad():
            graphs.features(raw)
            velocity(graphs, rows)(tiny.noise(len(rows), seed=1), torch.rand(len(rows)))
    assert len(graphs._graphs) == made


@pytest.mark.parametrize("network", ["pi05"], indirect=True)  # adaptive norms; ten seconds each
def test_layers_compile_without_a_break(network: FlowNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, not compiled: that every piece is one graph, and that its numbers are those of the plain piece."""
    plain = sample(network, encode(network, ROWS[1]), tiny.noise())
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: whole(function, backend="eager", fullgraph=True))
    fuse(network)
    compile_layers(network)
    assert gap(sample(network, encode(network, ROWS[1]), tiny.noise()), plain) <= 1e-5


def test_the_speed_follows_the_device_unless_it_is_named(network: FlowNetwork) -> None:
    assert type(open_stages(network, CPU, tiny.CAMERAS, "auto")) is Stages
    assert type(open_stages(network, CPU, tiny.CAMERAS, "plain")) is Stages
    assert type(open_stages(network, CPU, tiny.CAMERAS, "graphs")) is GraphStages


@pytest.mark.parametrize("name", FAMILIES)
def test_a_policy_serves_captured_stages(name: str) -> None:
    """Through the engine: joining rows, other prompts and cameras, a true Jacobian that runs plainly."""
    model, plain_model = (build(name, speed=speed, rtc={"mode": "vjp"}) for speed in ("graphs", "plain"))
    served = [serve(one, *"abc") for one in (model, plain_model)]
    for turn in range(2):
        seen = {
            n: joined(model, 3 * turn + i, 2 * turn, turn - 1 if turn else None, cameras=1 + i)
            for i, n in enumerate("abc")
        }
        chunks = []
        for engine in served:
            tickets = []
            for session, one in seen.items():
                tickets.append(engine.send(c.Next(ticket=0, session_id=SessionId(session), observation=one)))
                engine.cycle(3)
            engine.rest()
            chunks.append([actions(engine.result(ticket)) for ticket in tickets])
        for ours, theirs in zip(*chunks, strict=True):
            np.testing.assert_allclose(
                ours, theirs, atol=1e-4
            )  # the pull to the old chunk makes rounding five times larger
