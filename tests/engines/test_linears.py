"""Linear layers of other classes: those taken have the bits of nn.Linear, all others are named with the reason."""

import copy
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from support.tensor_cores import TensorCores
from torch import nn
from torch.nn import functional as F

import ablate
from ablate.engines import scaled_mm
from ablate.engines.hardware import Machine
from ablate.engines.linears import refuse_other
from ablate.numerics.philox import Clock
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Run
from ablate.training.models import quietly

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* of the weights of the model's linear layers:UserWarning",
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
)
INPUTS, OUTPUTS = 32, 64


def conv1d(inputs: int, outputs: int) -> nn.Module:
    with quietly():
        from transformers.pytorch_utils import Conv1D
    return Conv1D(outputs, inputs)


def falcon(inputs: int, outputs: int) -> nn.Module:
    with quietly():
        from transformers.models.falcon.modeling_falcon import FalconLinear
    return FalconLinear(inputs, outputs)


class Cast(nn.Linear):
    """As speed-run trainers write it; `dtype` and `name` are attributes that a converted layer has too."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias)
        self.dtype, self.name = torch.float16, "mine"

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias)

    def helper(self) -> str:
        return self.name


class WithProperties(Cast):
    """A class whose own attributes have names of a converted layer's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        nn.Linear.__init__(self, inputs, outputs)

    @property
    def dtype(self):
        return self.weight.dtype

    @property
    def name(self):
        return "mine"


class Multiplied(nn.Linear):
    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight) + self.bias


class Zeros(nn.Linear):
    """Only its construction is its own."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Derived(Cast):
    """Its base class is the one that is named."""


TAKEN = {
    "a cast": (Cast, [Cast]),
    "a cast with a bias": (lambda i, o: Cast(i, o, bias=True), [Cast]),
    "by name": (Cast, ["blocks.?.*"]),
    "derived": (Derived, [Cast]),
    "properties": (WithProperties, [WithProperties]),
    "einsum": (Multiplied, [Multiplied]),
    "construction alone": (Zeros, []),
    "falcon": (falcon, []),
    "conv1d": (conv1d, []),
}
"""Makers of linear layers, and what `linears` must name; none of the last three."""


class Block(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.up, self.down = make(INPUTS, OUTPUTS), make(OUTPUTS, INPUTS)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self, make, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(make) for _ in range(blocks))
        self.head = nn.Linear(INPUTS, INPUTS)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def drawn(model: nn.Module) -> nn.Module:
    """The model with weights drawn by their names, so that a twin of another class has the same ones."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            turned = is_conv1d_weight(model, parameter)
            shape = parameter.t().shape if turned else parameter.shape
            values = torch.randn(shape, generator=generator) * 0.2
            parameter.copy_(values.t() if turned else values)
    return model


def is_conv1d_weight(model: nn.Module, parameter: nn.Parameter) -> bool:
    return any(type(m).__name__ == "Conv1D" and m.weight is parameter for m in model.modules())


def twins(make) -> tuple[nn.Module, nn.Module, dict[str, bool]]:
    """A model of these layers, one of nn.Linear with the same weights, and which parameters are transposed."""
    own = drawn(Net(make))
    turned = {name: is_conv1d_weight(own, p) for name, p in own.named_parameters()}
    bias = own.blocks[0].up.bias is not None
    return own, drawn(Net(lambda i, o: nn.Linear(i, o, bias=bias))), turned


def trained(model: nn.Module, run) -> list[torch.Tensor]:
    """Losses, last input's gradient, and last gradients of all parameters, of three steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 8, INPUTS, generator=torch.Generator().manual_seed(step)).requires_grad_()
        with run.step():
            loss = (model(x) - x.detach().flip(-1)).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    return [*losses, x.grad]


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "bf16"])
@pytest.mark.parametrize("case", TAKEN)
def test_a_linear_layer_of_another_class_trains_with_the_bits_of_nn_linear(case, recipe):
    make, linears = TAKEN[case]
    own, plain, turned = twins(make)
    shapes = {name: value.shape for name, value in own.state_dict().items()}
    kinds = [type(module) for module in own.modules()]
    run = ablate.convert(own, recipe, linears=linears, measure_every=1)
    twin = ablate.convert(plain, recipe, measure_every=1)
    assert len(run.engine.layers) == 4
    for mine, right in zip(trained(own, run), trained(plain, twin), strict=True):
        assert torch.equal(mine, right)
    # Sums in fp64 over a transposed memory are in another order.
    assert run.metrics() == pytest.approx(twin.metrics(), rel=1e-12, nan_ok=True)
    expected = dict(plain.named_parameters())
    for name, parameter in own.named_parameters():
        for mine, right in ((parameter, expected[name]), (parameter.grad, expected[name].grad)):
            assert torch.equal(mine.t() if turned[name] else mine, right), name
    assert {name: value.shape for name, value in own.state_dict().items()} == shapes
    run.restore()
    assert [type(module) for module in own.modules()] == kinds


@pytest.mark.parametrize("rule", ["osci_reset", "q_ema", "q_ramping"])
def test_rules_for_weights_act_on_a_transposed_parameter_as_on_another(rule):
    spec = {
        "osci_reset": {"start": 0, "period": 2, "window": 1, "threshold": 0.01},
        "q_ema": {"decay": 0.5},
        "q_ramping": {"period": 2, "window": 1, "threshold": 0.01},
    }[rule]
    own, plain, _ = twins(conv1d)
    recipe = {"from": "nvfp4", "weights": {rule: spec}}
    found, right = (trained(model, ablate.convert(model, recipe, steps=3)) for model in (own, plain))
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert torch.equal(own.blocks[0].up.weight, plain.blocks[0].up.weight)


@pytest.mark.parametrize("make", [conv1d, falcon, Zeros])
def test_tensor_cores_multiply_linear_layers_of_another_class_too(make):
    """The engine scaled_mm has the emulator's operands, so both models must have equal bits on its doubles."""
    machine = Machine(capability=(10, 0), torch="2.13.0")
    results = []
    for model in twins(make)[:2]:
        cores = TensorCores()
        native = scaled_mm.Native("cublaslt", cores.scaled_mm, cores.mm_fp4)
        engine = scaled_mm.convert(model, PRESETS["fp8_current"](), Clock(0), native=native, machine=machine)
        engine.at(0, Run(1))
        x = torch.randn(32, INPUTS, generator=torch.Generator().manual_seed(0))
        model(x).square().sum().backward()
        assert len(cores.calls) >= 11  # three products of four layers, the first without dgrad
        weight = model.blocks[0].down.owner.grad
        results.append(model.blocks[0].down.part(weight))
    assert torch.equal(*results)


def test_a_restored_layer_has_its_own_forward_and_attributes_again():
    model = Net(Cast)
    model.blocks[0].up.colour = "blue"
    x = torch.randn(4, INPUTS, generator=torch.Generator().manual_seed(0))
    before = model(x)
    run = ablate.convert(model, "nvfp4", linears=[Cast])
    layer = model.blocks[0].up
    assert isinstance(layer, Cast)  # a model that asks for its class still finds it
    assert layer.name == "blocks.0.up"
    copied = copy.deepcopy(model)
    with run.evaluation():
        assert not torch.equal(model(x), before)
        assert torch.equal(model(x), copied(x))
    for restored in (run.restore(copied), run.restore()):
        layer = restored.blocks[0].up
        assert (type(layer), layer.colour, layer.dtype, layer.name) == (Cast, "blue", torch.float16, "mine")
        assert layer.helper() == "mine"
        assert torch.equal(restored(x), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", TAKEN)
def test_a_linear_layer_of_any_dtype_passes_the_proof(case, dtype):
    """Wide layers too, whose sums have many terms."""
    make, _ = TAKEN[case]
    for inputs, outputs in ((3, 5), (2048, 96), (96, 2048)):
        refuse_other(make(inputs, outputs).to(dtype), "wide")


def test_the_summary_counts_the_layers_that_were_proven():
    run = ablate.convert(Net(Cast), "nvfp4", linears=[Cast])
    assert "\n4 of them by proof that Cast is a linear layer\n" in str(run)
    assert {row.proven for row in run.layers if row.converted} == {"Cast"}
    assert "proof" not in str(ablate.convert(Net(nn.Linear), "nvfp4"))
    assert "proof" not in str(ablate.convert(Net(Zeros), "nvfp4"))


# --- what is no linear layer ------------------------------------------------------------------------


def other(forward, **added):
    """A class of nn.Linear whose forward pass is `forward`, with some attributes."""

    class Other(nn.Linear):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            for name, value in added.items():
                setattr(self, name, copy.deepcopy(value))
            nn.init.zeros_(self.weight)  # hides what forward does with it
            nn.init.zeros_(self.bias)

    Other.forward = forward
    return Other


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is twice too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


REFUSED = {
    "a scale": (other(lambda s, x: F.linear(x, s.weight, s.bias) * 1.001), "output differs by 0.001"),
    "an activation": (other(lambda s, x: F.linear(x, s.weight, s.bias).relu()), "output differs"),
    "no bias": (other(lambda s, x: F.linear(x, s.weight)), "output differs"),
    "weights in bf16": (
        other(lambda s, x: F.linear(x, s.weight.bfloat16().float(), s.bias)),
        "output differs by 0.00",
    ),
    "another dtype": (
        other(lambda s, x: F.linear(x, s.weight, s.bias).double()),
        r"output is \[2, 3, 64\] in torch.float64",
    ),
    "a frozen weight": (
        other(lambda s, x: F.linear(x, s.weight.detach(), s.bias)),
        "gradient of the weight is missing",
    ),
    "nothing to train": (
        other(lambda s, x: F.linear(x, s.weight, s.bias).detach()),
        "gradient of the input is missing",
    ),
    "another gradient": (
        other(lambda s, x: F.linear(Scaled.apply(x), s.weight, s.bias)),
        "gradient of the input differs by 1",
    ),
    "dropout": (other(lambda s, x: F.linear(F.dropout(x, 0.5, s.training), s.weight, s.bias)), "differs"),
    "another function in evaluation": (
        other(lambda s, x: F.linear(x, s.weight, s.bias) * (1 if s.training else 0.5)),
        "in evaluation, its output differs by 0.5",
    ),
    "an adapter that begins with zeros": (
        other(
            lambda s, x: F.linear(x, s.weight + s.b @ s.a, s.bias),
            a=nn.Parameter(torch.ones(2, 32)),
            b=nn.Parameter(torch.zeros(64, 2)),
        ),
        "has a beside weight and bias",
    ),
    "two results": (other(lambda s, x: (F.linear(x, s.weight, s.bias), x)), "not called as a linear layer"),
    "another argument": (other(lambda s, x, scale: F.linear(x, s.weight)), "not called as a linear layer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_class_that_computes_something_else_is_refused_by_layer_and_difference(case):
    kind, reason = REFUSED[case]
    model, called = Net(lambda i, o: kind(i, o) if i < o else nn.Linear(i, o)), []
    model.blocks[0].up.register_forward_hook(lambda *_: called.append(1))
    before = [(type(m), m.training) for m in model.modules()]
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match=rf"^blocks\.0\.up: Other .*{reason}"):
        ablate.convert(model, "nvfp4", linears=[kind])
    assert [(type(m), m.training) for m in model.modules()] == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not called
    left = ablate.convert(model, "nvfp4")
    assert {row.name for row in left.layers if row.converted} == {"blocks.0.down", "blocks.1.down"}


@pytest.mark.parametrize(
    ("linears", "words"),
    [
        ([type("Cast", (nn.Linear,), {})], "'Cast' is another class than the layers' of that name"),
        ([nn.Conv1d], "Conv1d selects no linear layer"),
        (["blocks.7.*"], "blocks.7.* selects no linear layer"),
        (["Cast"], "for the class, give Cast"),
        ([3], "3 is neither a class"),
    ],
)
def test_an_entry_that_selects_no_layer_is_refused(linears, words):
    with pytest.raises(ValueError, match=r"^linears: ") as refused:
        ablate.convert(Net(Cast), "nvfp4", linears=linears)
    assert words in str(refused.value)


def test_a_layer_without_values_cannot_be_proven():
    with torch.device("meta"):
        model = Net(Cast)
    with pytest.raises(ValueError, match=r"^blocks\.0\.up: Cast .* meta device"):
        ablate.convert(model, "nvfp4", linears=[Cast])


# --- what is passed over ----------------------------------------------------------------------------


class Mixed(nn.Module):
    """One block with a layer of every reason, and none that is converted."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Module()
        block.cast = Cast(64, 64)
        block.lora_A = nn.Linear(64, 4)
        block.router = nn.Linear(64, 6)
        block.filtered = nn.Linear(64, 8)
        block.attention = nn.MultiheadAttention(64, 2)
        self.blocks, self.head = nn.ModuleList([block]), nn.Linear(64, 7)


PASSED_OVER = {
    "blocks.0.cast": "a subclass of nn.Linear (Cast)",
    "blocks.0.lora_A": "an adapter of LoRA",
    "blocks.0.router": "a router of experts",
    "blocks.0.filtered": "left out by the filter",
    "blocks.0.attention.out_proj": "MultiheadAttention multiplies by its weight itself",
    "head": "outside of the blocks",
}


def test_every_layer_that_is_passed_over_has_its_reason():
    def wanted(name: str, linear: nn.Module) -> bool:
        return "filtered" not in name

    with pytest.raises(ValueError, match=r"^nothing of the model would be quantised; passed over") as refused:
        ablate.convert(Mixed(), "nvfp4", filter=wanted)
    rows = {
        row.name: row.reason
        for row in ablate.convert(Mixed(), "nvfp4", filter=wanted, linears=["*.lora_A"]).layers
    }
    for name, reason in PASSED_OVER.items():
        if name != "blocks.0.lora_A":
            assert rows[name].startswith(reason)
    assert rows["blocks.0.lora_A"] == ""
    listed = str(refused.value).partition("largest first: ")[2].split("; ")
    assert len(listed) == 5  # one for each reason, the largest first
    assert [row.partition(": ")[0].partition(" [")[0] for row in listed[:2]] == [
        "blocks.0.attention.in_proj_weight",
        "blocks.0.cast",
    ]
    assert "linears=[Cast] takes it" in listed[1]
    assert "blocks.0.filtered [8, 64]: left out by the filter" in listed
    with pytest.warns(UserWarning, match=r"blocks\.0\.cast \[64, 64\]: a subclass of nn\.Linear \(Cast\)"):
        ablate.convert(Mixed(), "nvfp4")


def test_layers_of_one_reason_are_counted():
    with pytest.raises(ValueError, match=r"blocks\.0\.up \[64, 32\] and 3 more: a subclass .*\(Cast\)"):
        ablate.convert(Net(Cast), "nvfp4")


# --- families of transformers -----------------------------------------------------------------------

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = SIZES | {"num_key_value_heads": 1, "intermediate_size": 48}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
WIDE = LLAMA | {"head_dim": 16}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi", "phi3", "olmo", "olmo2", "stablelm"), LLAMA),
    **dict.fromkeys(("starcoder2", "granite", "cohere"), LLAMA),
    **dict.fromkeys(("qwen3", "gemma", "gemma2", "gemma3_text"), WIDE),
    "mixtral": LLAMA | {"num_local_experts": 4},
    "qwen2_moe": LLAMA | EXPERTS,
    "gpt2": GPT,
    "openai-gpt": GPT,
    "gptj": GPT | {"rotary_dim": 8},
    "gpt_neox": SIZES | {"intermediate_size": 48},
    "opt": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 2},
    "falcon": SIZES,
    "mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 64},
}
"""25 families of decoders by model type, with a small configuration."""


def small(family: str) -> nn.Module:
    pytest.importorskip("transformers")
    from ablate.training.models import causal

    return causal.build({"model_type": family, **FAMILIES[family], **IDS}, 64, 0, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_transformers_trains_with_every_matrix_of_its_blocks(family):
    model = small(family)
    names = dict(model.named_parameters())
    run = ablate.convert(model, "nvfp4", steps=3, measure_every=0)
    left = {row.name: row.reason for row in run.layers if row.block and not row.converted}
    assert all("Router" in reason or "shared expert" in reason for reason in left.values()), left
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(3):
        with run.step():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert all(after < before for before, after in pairwise(losses)), losses
    run.restore()
    assert dict(model.named_parameters()).keys() == names.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt2", "openai-gpt", "falcon"])
def test_without_quantisation_a_family_of_other_layers_computes_what_it_did(family):
    """In fp32; products are added up in another order: 2^-18 of the largest value."""
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        model.eval()(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    model = small(family)
    expected = gradients(model)
    with ablate.convert(model, "fp32").evaluation():
        for mine, right in zip(gradients(model), expected, strict=True):
            assert (mine - right).abs().max() <= 2**-18 * right.abs().max()


# --- adapters -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_a_conv1d_with_adapters_is_refused_since_a_merge_would_miss_it():
    if find_spec("peft") is None:
        pytest.skip("peft is not installed")
    from ablate.training.models.adapters import adapt

    model = adapt(small("gpt2"), ["transformer.h.0.attn.c_proj"], 4, 8.0, 0.0, 0)
    with pytest.raises(ValueError, match=r"c_proj\.base_layer: .* call get_peft_model after the conversion"):
        ablate.convert(model, "nvfp4")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("linears", [(), ["*.lora_*"]])
def test_adapters_of_peft_are_converted_only_if_they_are_asked_for(linears):
    if find_spec("peft") is None:
        pytest.skip("peft is not installed")
    from ablate.training.models.adapters import adapt

    model = small("llama")
    kinds = (nn.Linear, type(conv1d(1, 1)))
    layers = [n for n, m in model.named_modules() if isinstance(m, kinds) and n != "lm_head"]
    model = adapt(model, layers, 4, 8.0, 0.0, 0)
    run = ablate.convert(model, "nvfp4", linears=linears, measure_every=0)
    rows = {row.name: row for row in run.layers}
    adapters = {name for name in rows if ".lora_" in name}
    assert len(adapters) == 2 * len(layers)
    assert all(rows[name].converted == bool(linears) for name in adapters)
    assert sum(row.converted for row in rows.values()) == len(layers) + len(adapters) * bool(linears)
    assert bool(linears) != ("an adapter of LoRA, which stays in high precision" in str(run))
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    with run.step():
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_" in name)
