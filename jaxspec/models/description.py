"""Descriptions of what a decoder computes, frozen and without arrays: static under jit, made by `jaxspec.models`.

A field that has a default is at it in the plainest transformer (Llama's). That makes `beyond` an allow-list: a path
names the fields that it implements, and whatever else differs from the plainest it refuses, fields that are added later
included.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from jaxspec.models.memory import Memory, PagedRows, Recurrence
from jaxspec.models.positions import ScaleByPosition, Window
from jaxspec.models.rope_scaling import Rope

Table = Mapping[type, frozenset[str]]  # by kind of description, the fields that a path implements


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm. `centred`: its weight is an offset from one, applied in float32 (as Qwen3-Next's).
    `mean`: the mean is subtracted first (a layer norm without a bias, as Cohere's)."""

    eps: float
    centred: bool = False
    mean: bool = False


# A device's part of `count` things, called `what` in errors: share(what, count, repeated=False). One may be `repeated`
# on several devices.
Share = Callable[..., int]


@runtime_checkable
class Kind(Protocol):
    """The description of a kind of mixing. Its equations are in the table `decoder.mixings.MIXINGS`, by its type."""

    @property
    def memory(self) -> Memory:
        """Memory of the past. Layers whose memory is equal share an array."""

    @property
    def columns(self) -> int:
        """Columns of its matrices, each as long as the model is wide: the weights that a token is multiplied by."""

    def divided(self, share: Share) -> Kind:
        """Describe the part of one of several devices. **Raises:** as `share`, for a number that can't be divided."""


@dataclass(frozen=True)
class Attention:
    """Causal attention, grouped heads.

    `qk_norm`: of each query and key head; with `qk_norm_all`, of all query heads together and all key heads;
    `qk_norm_rotated`: after they are rotated; `qk_norm_unit`: without a weight. `gated`: each query head's columns are
    followed by its gate's, whose sigmoid multiplies what the head mixes. `bias`: of q, k and v. `out_bias`: of the
    output projection. `window`: how many positions a token sees, its own and those before it, or chunks; None: all.
    `scale`: what scores are multiplied by; None: head_dim**-0.5. `sinks`: each head has a learnt logit more in its
    softmax, which no value belongs to. `v_norm`: of each value head, without a weight. `k_is_v`: values are the keys'
    projection, before any norm and rotation. `shared`: keys and values are those of the last layer before it that is
    like it and has its own. `value_dim`: the width of a value head; None: `head_dim`. `value_scale`: what values are
    multiplied by. `pool`: as of `PagedRows`. `position_scale`: what queries are multiplied by, beside `scale`.
    `score_cap`: scores are squashed below it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qk_norm: Norm | None = None
    qk_norm_all: bool = False
    qk_norm_rotated: bool = False
    qk_norm_unit: bool = False
    gated: bool = False
    bias: bool = False
    out_bias: bool = False
    window: Window | None = None
    scale: float | None = None
    sinks: bool = False
    v_norm: Norm | None = None
    k_is_v: bool = False
    shared: bool = False
    value_dim: int | None = None
    value_scale: float = 1.0
    pool: int = 0
    position_scale: ScaleByPosition | None = None
    score_cap: float | None = None

    @property
    def values(self) -> int:
        """Columns of a value head."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def memory(self) -> PagedRows:
        """Keys and values of one width: where theirs differ, with zeros up to a power of two, as kernels take."""
        width = self.head_dim if self.value_dim is None else 1 << (max(self.head_dim, self.value_dim) - 1).bit_length()
        return PagedRows(self.kv_heads, width, pool=self.pool)

    @property
    def columns(self) -> int:
        own = 0 if self.shared else 1 if self.k_is_v else 2
        keys, values = min(own, 1) * self.kv_heads, max(own - 1, 0) * self.kv_heads
        return (self.heads + keys) * self.head_dim + (self.heads + values) * self.values

    @property
    def pair_flops(self) -> int:
        """Operations of a row with each position that it sees."""
        return 2 * self.heads * (self.head_dim + self.values)

    def divided(self, share: Share) -> Attention:
        heads, kv_heads = share("query heads", self.heads), share("KV heads", self.kv_heads, repeated=True)
        return dataclasses.replace(self, heads=heads, kv_heads=kv_heads)


@dataclass(frozen=True)
class IndexedAttention(Attention):
    """Causal attention to the blocks of tokens that an indexer likes best (Qwen's QSA), and to those after the last.

    `ratio` tokens are a block. Its key is the mean of its tokens' index keys, `index_width` wide, normed and rotated as
    its first token. A row scores each block that ends at it or before: the sum over `index_heads` queries of what is
    positive of their products. It attends to the tokens of `budget // ratio` blocks at most.
    """

    index_heads: int = field(kw_only=True)
    index_width: int = field(kw_only=True)
    budget: int = field(kw_only=True)
    ratio: int = field(kw_only=True)

    @property
    def further(self) -> tuple[Memory, ...]:
        """Memory of the index keys, a group behind that of keys and values. Each device has all of it."""
        return (PagedRows(1, self.index_width, streams=1),)

    @property
    def columns(self) -> int:
        return super().columns + (self.index_heads + 1) * self.index_width


@dataclass(frozen=True)
class LatentAttention:
    """Causal attention over latents (MLA, https://arxiv.org/abs/2405.04434, section 2.1).

    All heads share one row a token: a normed latent, `latent` wide, and behind it the key's `rope.columns`. Each head
    makes `key_dim` more columns of its key, and a value of `value_dim`, of the latent. Queries are made of a normed
    latent of their own, `query_latent` wide; None: of the layer's input. `scale`: what scores are multiplied by.
    `norm`: of both latents. `by_request`: devices that divide the requests, each with all heads (`--dp-attention`).
    `position_scale`: as of `Attention`.
    """

    heads: int
    latent: int
    key_dim: int
    value_dim: int
    rope: Rope
    scale: float
    norm: Norm
    query_latent: int | None = None
    by_request: int = 1
    position_scale: ScaleByPosition | None = None

    @property
    def memory(self) -> PagedRows:
        return PagedRows(1, self.latent + self.rope.columns, streams=1, by_request=self.by_request)

    @property
    def query_dim(self) -> int:
        """Columns of a query head, those that rotate last."""
        return self.key_dim + self.rope.columns

    @property
    def columns(self) -> int:
        """Columns of the first products and of the outputs; matrices behind a latent are shorter, and left out."""
        queries = self.query_latent or self.heads * self.query_dim
        return queries + self.memory.width + self.heads * self.value_dim

    @property
    def pair_flops(self) -> int:
        """Operations of a row with each position that it sees, queries being projected into the latent."""
        return 2 * self.heads * (self.memory.width + self.latent)

    def divided(self, share: Share) -> LatentAttention:
        """Describe the part of one of several devices, which has the latents of all tokens, or all heads."""
        return self if self.by_request > 1 else dataclasses.replace(self, heads=share("query heads", self.heads))


@dataclass(frozen=True)
class DeltaRule:
    """Linear attention by a gated delta rule (https://arxiv.org/abs/2412.06464), over a state of fixed size.

    Each of `key_heads` serves as many of `value_heads`; `taps` is the width of the convolution before them. `gate`: the
    activation of the outputs' gates.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    gate: Literal["silu", "sigmoid"] = "silu"

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def memory(self) -> Recurrence:
        heads, widths = (self.key_heads, self.value_heads), (self.key_dim, self.value_dim)
        return Recurrence(*heads, *widths, self.channels, self.taps)

    @property
    def columns(self) -> int:
        """Convolved channels, the outputs' gates, two numbers a head, and the outputs."""
        return self.channels + 2 * self.value_heads * self.value_dim + 2 * self.value_heads

    def divided(self, share: Share) -> DeltaRule:
        keys = share("key heads of linear attention", self.key_heads)
        values = share("value heads of linear attention", self.value_heads)
        return dataclasses.replace(self, key_heads=keys, value_heads=values)


@dataclass(frozen=True)
class KimiDelta:
    """Kimi Delta Attention (https://arxiv.org/abs/2510.26692): a delta rule in which each key channel has a decay.

    Each of `heads` has a key and a value, both `width` wide. Decays, and the gates of outputs, are made of projections
    of the rows that are `width` wide. `taps`: the width of the convolution before the heads.
    """

    heads: int
    width: int
    taps: int

    @property
    def inner(self) -> int:
        """Columns of all heads."""
        return self.heads * self.width

    @property
    def memory(self) -> Recurrence:
        heads, widths = (self.heads, self.heads), (self.width, self.width)
        return Recurrence(*heads, *widths, 3 * self.inner, self.taps, channel_decay=True)

    @property
    def columns(self) -> int:
        """Convolved channels, two narrow projections, a number a head, and the outputs."""
        return 4 * self.inner + 2 * self.width + self.heads

    def divided(self, share: Share) -> KimiDelta:
        return dataclasses.replace(self, heads=share("heads of linear attention", self.heads))


@dataclass(frozen=True)
class Mamba2:
    """A state-space layer (Mamba 2, https://arxiv.org/abs/2405.21060): S = decay S + dt x B', read by C, + D x.

    Each of `heads`, `width` wide, has a state `state` wide. They stand in `groups` of as many heads, which share B and
    C, and whose outputs, gated first, have a norm; `group_devices` neighbours share a group, and its norm. `taps`: the
    width of the convolution before them; `conv_bias`: it has a bias. `bias`: of the first and the last projection. dt
    lies between `least_step` and `most_step`.
    """

    heads: int
    width: int
    groups: int
    state: int
    taps: int
    conv_bias: bool = True
    bias: bool = False
    least_step: float = 0.0
    most_step: float = float("inf")
    group_devices: int = 1

    @property
    def inner(self) -> int:
        """Columns of all heads."""
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Channels of the convolution: x of all heads, B and C of all groups."""
        return self.inner + 2 * self.groups * self.state

    @property
    def memory(self) -> Recurrence:
        return Recurrence(self.groups, self.heads, self.state, self.width, self.channels, self.taps)

    @property
    def columns(self) -> int:
        """Convolved channels, the outputs' gates, a number a head, and the outputs."""
        return self.channels + 2 * self.inner + self.heads

    def divided(self, share: Share) -> Mamba2:
        heads, groups = share("state-space heads", self.heads), share("groups of heads", self.groups, repeated=True)
        sharing = self.heads // heads * groups // self.groups
        return dataclasses.replace(self, heads=heads, groups=groups, group_devices=sharing)


@dataclass(frozen=True)
class Absent:
    """No mixing, or no MLP, in a layer that has the other one alone."""

    memory: ClassVar[None] = None
    columns: ClassVar[int] = 0
    width: ClassVar[int] = 0

    def divided(self, share: Share) -> Absent:
        return self


@dataclass(frozen=True)
class Mlp:
    """down(activation(gate) * up), `width` wide. `bias`: of all three. `activation`: "silu", GELU by its tanh, or the
    square of ReLU. Without being `gated`, it is down(activation(up))."""

    width: int
    bias: bool = False
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    gated: bool = True


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss' activation: (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit and -limit <= up <= limit."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class SigmoidScores:
    """Experts scored one by one, by a sigmoid (DeepSeek-V3's, https://arxiv.org/abs/2412.19437, section 2.1.2).

    A learnt correction of each (weight "router_correction") counts in the choice, not in the weights, if they are
    `corrected`. The experts stand in `groups` of equal size, of which a token has those in the `top_groups` whose two
    best are best together. `scale`: what the weights are multiplied by. `function`: "softmax" in ERNIE 4.5, over all
    experts.
    """

    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    function: Literal["sigmoid", "softmax"] = "sigmoid"
    corrected: bool = True


@dataclass(frozen=True)
class Mixture:
    """A mixture of `experts` small MLPs, `width` wide, of which a router picks `per_token`.

    `renormalised`: the weights of those picked sum to one, as after a softmax over their logits alone. `shared`: the
    width of one more, that every token has; 0: there is none; `shared_gated`: a sigmoid of its own is its weight,
    otherwise one. `scores`: of the experts, from the router's logits. `bias`: of the experts' matrices. `router_bias`:
    of the router's logits. `groups`: how many groups of devices the experts are divided among; see `weights.Split`.
    `activation` and `gated`: as of an `Mlp`, of the shared expert, too. `latent`: the width of a projection of the rows
    that experts take in place of them, and whose results are projected back; 0: there is none. `beside`: an MLP whose
    result is added to the experts' (Gemma 4's), each with norms of its own ("experts_norm"; "mlp_own_norm",
    "experts_own_norm"); the router has a norm of its own, too ("router_norm"), and each expert a learnt number by which
    its weight is multiplied ("expert_scale"). `weighs_inputs`: the one expert of a token has its weight multiply what
    goes into it, not what comes out (Llama 4's).
    """

    experts: int
    per_token: int
    width: int
    renormalised: bool = True
    shared: int = 0
    shared_gated: bool = True
    scores: Literal["softmax"] | SigmoidScores = "softmax"
    bias: bool = False
    router_bias: bool = False
    activation: Literal["silu", "gelu_tanh", "relu2"] | ClampedSwiglu = "silu"
    groups: int = 1
    gated: bool = True
    latent: int = 0
    beside: Mlp | None = None
    weighs_inputs: bool = False


@dataclass(frozen=True)
class LayerInputs:
    """Inputs that layers have beside the residual stream, `width` wide (Gemma 4's per-layer embeddings).

    Each layer has a row of a table of `vocab_size` tokens ("layer_embed"), times the root of the width, and a
    projection of the embedding ("layer_projection"), times the model's width**-0.5 and then normed. Their sum is
    multiplied by 2**-0.5. Rows of a picture have those of the token `padding`, and projections of their own.
    """

    width: int
    vocab_size: int
    padding: int = 0


@dataclass(frozen=True)
class NGrams:
    """Rows of a table by the hashes of each token's n-grams, added to the residual streams ahead of a layer.

    There are n-grams of 2 to `longest` tokens, and of each length equally many `sizes`: the rows of the table that each
    hash counts to, one behind the other, of `rows` in all, in `parts` tensors, `width` wide. The hash is the exclusive
    or of the tokens' products with `multipliers`. An n-gram ends before the token `end`, in place of which, and of all
    before it, stands `end`. What is looked up gives one value for all streams, and a key of each stream, which gates
    it ("ngram_*"). A convolution of `taps` rows, `longest` apart, over `channels` adds what came before. `number`:
    among the layers that have n-grams.
    """

    sizes: tuple[int, ...]
    multipliers: tuple[int, ...]
    rows: int
    parts: int
    width: int
    taps: int
    end: int
    channels: int
    number: int = 0

    @property
    def longest(self) -> int:
        return len(self.multipliers)

    @property
    def reach(self) -> int:
        """How many rows before its own the convolution takes."""
        return (self.taps - 1) * self.longest

    @property
    def memories(self) -> tuple[Recurrence, Recurrence]:
        """The newest tokens, and the newest inputs of the convolution."""
        return Recurrence.newest(self.longest - 1, 1, "int32"), Recurrence.newest(self.reach, self.channels)


@dataclass(frozen=True)
class Streams:
    """Residual streams, `count` of them side by side, by which layers are connected ("hyper-connections").

    A sub-layer takes the mean of the normed streams, each number times a gate of its own, made of all of them by way of
    `rank` numbers. Its output is added to each stream, times a gate of the stream. After the last layer the same mean
    is in place of the final norm.
    """

    count: int
    rank: int


@dataclass(frozen=True)
class Layer:
    """x + mixing(norm(x)), then x + feed(norm(x)). Either may be absent.

    `pre_norm`: whether a sub-layer's input is normed (weights "attn_norm", "mlp_norm"). `post_norm`: each sub-layer's
    output is normed before it is added ("attn_post_norm", "mlp_post_norm"). `residual_scale`: what it is multiplied by.
    `input_width`: that of the layer's own input, which is multiplied by the activation of a gate ("input_gate"),
    projected ("input_out"), normed ("input_norm") and added; 0: it has none. `output_scaled`: the whole output is
    multiplied by a learnt number ("layer_scale"). `parallel`: x + mixing(norm(x)) + feed(norm(x)), by one "attn_norm".
    `ngrams`: what is added to its input.
    """

    mixing: Kind | Absent
    feed: Mlp | Mixture | Absent
    norm: Norm
    pre_norm: bool = True
    post_norm: bool = False
    residual_scale: float = 1.0
    input_width: int = 0
    output_scaled: bool = False
    parallel: bool = False
    ngrams: NGrams | None = None

    @property
    def memories(self) -> tuple[Memory, ...]:
        """Memories of the past that are the layer's own."""
        own = () if self.mixing.memory is None or shares(self.mixing) else (self.mixing.memory,)
        own = (*own, *getattr(self.mixing, "further", ()))
        return own if self.ngrams is None else (*self.ngrams.memories, *own)


@dataclass(frozen=True)
class Decoder:
    """A stack of layers, `width` wide, between embedding and head. `tied`: the head is the embedding.

    `embed_scale`: what embeddings are multiplied by, rounded to the activations' dtype. `logit_scale`: what logits are
    multiplied by. `logit_cap`: logits are squashed below it, cap * tanh(logit / cap); None: they aren't.
    `layer_inputs`: those that layers have of their own. `deterministic`: a row has the same bits whatever rows are
    beside it, and its attention sums so many tokens by themselves; 0: it needn't. `reports_experts`: a forward returns
    the experts that mixtures chose. `streams`: the residual stream is several; None: one.
    """

    vocab_size: int
    width: int
    layers: tuple[Layer, ...]
    norm: Norm
    tied: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    layer_inputs: LayerInputs | None = None
    deterministic: int = 0
    reports_experts: bool = False
    streams: Streams | None = None

    @property
    def attention(self) -> Attention | LatentAttention | None:
        """The mixing of the first layer that keeps rows in pages."""
        return next((layer.mixing for layer in self.layers if isinstance(layer.mixing.memory, PagedRows)), None)

    @property
    def recurrent(self) -> bool:
        """Whether some layer's past is a state of fixed size."""
        return bool(self.groups(Recurrence))

    def groups(self, sort: type) -> dict[Memory, int]:
        """Memories of this sort, in order of their first layers, and how many layers have each."""
        return dict(Counter(each for layer in self.layers for each in layer.memories if isinstance(each, sort)))

    @property
    def by_request(self) -> int:
        """How many devices the requests' pages are divided among."""
        return max((rows.by_request for rows in self.groups(PagedRows)), default=1)

    @property
    def memory_index(self) -> tuple[tuple[int, int], ...]:
        """Number each layer's memory among the groups of its sort, and the layer in its group; zeros: it has none.

        A layer that shares another's has that one's numbers.
        """
        counts, out, newest = Counter(), [], {}
        for mixing in (layer.mixing for layer in self.layers):
            if shares(mixing):
                out.append(newest[dataclasses.replace(mixing, shared=False)])
                continue
            known = list(self.groups(type(mixing.memory))) if mixing.memory else [None]
            out.append((known.index(mixing.memory), counts[mixing.memory] if mixing.memory else 0))
            counts[mixing.memory] += 1
            newest[mixing] = out[-1]
        return tuple(out)

    @property
    def sharing(self) -> frozenset[int]:
        """Numbers of the layers that read keys and values that other layers have written."""
        return frozenset(i for i, layer in enumerate(self.layers) if shares(layer.mixing))

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Ropes of the layers that have one, each once."""
        return tuple(dict.fromkeys(rope for layer in self.layers if (rope := getattr(layer.mixing, "rope", None))))

    @property
    def mixture(self) -> Mixture | None:
        return next((layer.feed for layer in self.layers if isinstance(layer.feed, Mixture)), None)

    @property
    def ngrams(self) -> NGrams | None:
        """N-grams of the first layer that has some."""
        return next((layer.ngrams for layer in self.layers if layer.ngrams), None)

    @property
    def last_streams(self) -> int:
        """Number of all residual streams behind the last layer among what a forward captures."""
        return len(self.layers) + 1

    @property
    def routing(self) -> tuple[int, int]:
        """How many mixtures there are, and the experts that each chooses for a token."""
        mixtures = [layer.feed for layer in self.layers if isinstance(layer.feed, Mixture)]
        return len(mixtures), self.mixture.per_token


def shares(mixing: Kind | Absent) -> bool:
    """Whether a layer reads keys and values that another layer has written."""
    return getattr(mixing, "shared", False)


def beyond(description: Any, implements: Table) -> str | None:
    """Name what of a description a path that `implements` only so much would compute wrongly; None if nothing.

    That is a kind of description which isn't in the table, or a field which isn't named there and isn't at its default.
    """
    return next(_beyond(description, implements), None)


def _beyond(description: Any, implements: Table) -> Iterator[str]:
    if isinstance(description, tuple):
        for each in dict.fromkeys(description):
            yield from _beyond(each, implements)
    elif dataclasses.is_dataclass(description):
        kind = type(description)
        if kind not in implements:
            yield f"{kind.__name__}"
            return
        for each in dataclasses.fields(description):
            value = getattr(description, each.name)
            if each.name in implements[kind]:
                yield from _beyond(value, implements)
            elif value != each.default:
                yield f"{kind.__name__}.{each.name}={value!r}"
