"""Model: the shape of a transformer, and the counts that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from trimaran.nouns.attention import LatentAttention, RotaryScaling, RotaryYarn
from trimaran.nouns.dispatcher import Router
from trimaran.nouns.noun import Noun

Positions = Literal["learned", "rotary", "alibi"]
Norm = Literal["layernorm", "rmsnorm"]
Mlp = Literal["gelu", "swiglu", "geglu", "relu2"]
# MLPs that multiply an activated gate with their other half.
GATED = ("swiglu", "geglu")
Activation = Literal["gelu", "gelu_tanh"]
Head = Literal["vocabulary", "classifier"]
NormPlacement = Literal["before", "after", "both"]
QkNorm = Literal["none", "head", "all_heads"]
# Layers of a model differ in what stands behind attention: an MLP, or a mixture of experts.
LayerKind = Literal["dense", "experts"]
AttentionBias = Literal["none", "qkv", "all"]
RotaryStretch = Literal["none", "linear", "dynamic", "yarn", "longrope"]

MOST_LAYERS = 100_000


def padded_vocab(vocab: int, tp: int) -> int:
    """Vocabulary rounded up to a multiple of 128 x TP, as Megatron-LM lays it out."""
    multiple = 128 * tp
    return -(-vocab // multiple) * multiple


class Model(Noun):
    """A decoder-only transformer. Sizes are counts; nothing here depends on how it is trained."""

    name: str = ""
    layers: int = Field(gt=0, le=MOST_LAYERS)
    hidden: int = Field(gt=0, le=10_000_000)
    heads: int = Field(gt=0, le=1_000_000)
    vocab: int = Field(gt=1, le=100_000_000)
    ffn_hidden: int = Field(default=0, ge=0, le=100_000_000, description="0 stands for 4 x hidden")
    kv_heads: int = Field(default=0, ge=0, le=1_000_000, description="0 stands for heads")
    head_dim: int = Field(default=0, ge=0, le=1_000_000, description="0 stands for hidden / heads")
    max_positions: int = Field(default=2048, gt=0, le=100_000_000)
    tied_embedding: bool = True
    positions: Positions = "learned"
    rotary_theta: float = Field(default=10_000.0, gt=0, description="base of the rotary angles")
    rotary_scaling: RotaryScaling | None = None
    rotary_stretch: RotaryStretch = Field(
        default="none", description="how angles reach a longer context, where not as rotary_scaling says"
    )
    rotary_yarn: RotaryYarn | None = Field(default=None, description="of a rotary_stretch of yarn, its numbers")
    rotary_share: float = Field(default=1.0, gt=0, le=1, description="share of a head's features that are turned")
    norm: Norm = "layernorm"
    norm_epsilon: float = Field(default=1e-5, gt=0, lt=1)
    norm_placement: NormPlacement = Field(
        default="before", description="norms of what attention and MLP read, of what they give, or of both"
    )
    qk_norm: QkNorm = Field(
        default="none", description="queries and keys are normalised: each head alone, or all heads as one"
    )
    parallel_residual: bool = Field(default=False, description="the MLP reads what attention reads (GPT-NeoX)")
    mlp: Mlp = Field(default="gelu", description="relu2: the square of a ReLU (Nemotron)")
    activation: Activation = Field(
        default="gelu_tanh",
        description="GELU, exact or by tanh. Unstated: tanh, as GPT-2, GPT-3 and BLOOM have it; exact with rotary",
    )
    swiglu_limit: float = Field(
        default=0.0,
        ge=0,
        description="of gpt-oss: both halves stay within it, the gate is a quick GELU of one, the other plus 1 is what "
        "it multiplies; 0: SwiGLU",
    )
    bias: bool = True
    attention_bias: AttentionBias | None = Field(
        default=None, description="biases of attention: none, of queries, keys and values, or of all; None: as `bias`"
    )
    sliding_window: int = Field(
        default=0, ge=0, le=100_000_000, description="tokens that a token attends to, itself among them; 0: all"
    )
    full_attention_every: int = Field(
        default=0, ge=0, le=100_000, description="every n-th layer has no sliding window; 0: none such"
    )
    query_scale: float | None = Field(
        default=None, gt=0, description="scores are divided by its square root; None: by that of head_dim"
    )
    attention_softcap: float = Field(default=0.0, ge=0, description="scores stay within it, by tanh; 0: no cap")
    logit_softcap: float = Field(default=0.0, ge=0, description="logits stay within it, by tanh; 0: no cap")
    scaled_embedding: bool = Field(default=False, description="embeddings are multiplied by the root of hidden")
    attention_sinks: bool = Field(default=False, description="a learned score a head takes part in the softmax")
    latent_attention: LatentAttention | None = None
    experts: int = Field(default=0, ge=0, le=1_000_000, description="routed experts of a layer; 0: a dense MLP")
    top_k: int = Field(default=0, ge=0, le=1_000_000, description="routed experts that a token goes to")
    moe_ffn_hidden: int = Field(default=0, ge=0, le=100_000_000, description="inner width of one expert")
    shared_experts: int = Field(default=0, ge=0, le=1_000_000, description="experts that every token goes to")
    dense_layers: int = Field(default=0, ge=0, le=MOST_LAYERS, description="first layers, which have a dense MLP")
    experts_every: int = Field(
        default=1, ge=1, le=MOST_LAYERS, description="every n-th layer has experts, those between a dense MLP; 1: all"
    )
    expert_groups: int = Field(
        default=0, ge=0, le=1_000_000, description="equal groups of experts, of which a token first chooses; 0: none"
    )
    top_groups: int = Field(default=0, ge=0, le=1_000_000, description="groups whose experts a token may go to")
    shared_gate: bool = Field(
        default=False, description="what shared experts give is multiplied by a learned gate of each token"
    )
    router: Router = Router()
    uncounted: tuple[str, ...] = Field(
        default=(),
        description="what the family has besides, by its config's key, that no operator counts and nothing trains",
    )
    mtp_depth: int = Field(
        default=0,
        ge=0,
        le=100,
        description="further tokens that a token predicts, each by a layer of its own behind the last (multi-token "
        "prediction); software that does not train them leaves them out",
    )
    embedding_norm: bool = False
    head: Head = Field(default="vocabulary", description="classifier: no logits over the vocabulary")
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, data: object) -> object:
        """Derived sizes are filled in once, so that every reader sees the real number."""
        if not isinstance(data, dict):
            return data
        if data.get("positions") == "rotary" and data.get("activation") is None:
            data = {**data, "activation": "gelu"}
        hidden, heads = data.get("hidden"), data.get("heads")
        if not (isinstance(hidden, int) and isinstance(heads, int) and hidden > 0 and heads > 0):
            return data
        if data.get("head_dim") in (None, 0) and hidden % heads:
            raise ValueError(
                f"hidden {hidden} is not a multiple of heads {heads}: "
                f"choose heads that divide hidden, or state head_dim"
            )
        filled = dict(data)
        for name, derived in (("ffn_hidden", 4 * hidden), ("kv_heads", heads), ("head_dim", hidden // heads)):
            if data.get(name) in (None, 0):
                filled[name] = derived
        return filled

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.full_attention_every and not self.sliding_window:
            raise ValueError(
                f"full_attention_every is {self.full_attention_every}, but sliding_window is 0: state the window of "
                f"the other layers, or leave both out"
            )
        if self.rotary_yarn is not None and self.rotary_stretch != "yarn":
            raise ValueError(
                f"rotary_yarn is stated, but rotary_stretch is {self.rotary_stretch}: set that to yarn, or leave "
                f"rotary_yarn out"
            )
        if self.swiglu_limit and self.mlp != "swiglu":
            raise ValueError(
                f"swiglu_limit is {self.swiglu_limit:g}, but mlp is {self.mlp}: set that to swiglu, or leave "
                f"swiglu_limit out"
            )
        self._check_experts()
        self._check_latent()
        if self.positions == "rotary" and self.rotary_dim % 2:
            whole = self.rotary_share == 1
            share = "" if whole else f" x rotary_share {self.rotary_share:g} is {self.rotary_dim}, which"
            raise ValueError(
                f"head_dim {self.head_dim}{share} is odd, and rotary positions turn features in pairs: make it even"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: "
                f"each key-value head serves a whole number of heads"
            )
        return self

    def _check_latent(self) -> None:
        latent = self.latent_attention
        if latent is None:
            return
        if self.head_dim != latent.head_dim:
            raise ValueError(
                f"head_dim {self.head_dim} is not latent_attention's plain_dim {latent.plain_dim} + rotary_dim "
                f"{latent.rotary_dim}: state their sum"
            )
        if self.rotary_share != 1:
            raise ValueError(
                f"rotary_share is {self.rotary_share:g}, but latent_attention's rotary_dim {latent.rotary_dim} says "
                f"what is turned: leave rotary_share out"
            )
        if self.positions == "rotary" and latent.rotary_dim % 2:
            raise ValueError(
                f"latent_attention's rotary_dim {latent.rotary_dim} is odd, and rotary positions turn features in "
                f"pairs: make it even"
            )

    def _check_experts(self) -> None:
        fields = ("top_k", "moe_ffn_hidden", "shared_experts", "dense_layers", "expert_groups", "top_groups")
        sizes = {name: getattr(self, name) for name in fields}
        if not self.experts:
            for name, value in (sizes | {"experts_every": self.experts_every}).items():
                if value != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is {value}, but experts is 0: state experts, or leave {name} out")
            if self.shared_gate:
                raise ValueError("shared_gate is true, but experts is 0: state experts, or leave shared_gate out")
            if self.router != Router():
                raise ValueError("router is stated, but experts is 0: state experts, or leave router out")
            return
        for name in ("top_k", "moe_ffn_hidden"):
            if not sizes[name]:
                raise ValueError(f"experts is {self.experts}, but {name} is 0: state it")
        if self.shared_gate and not self.shared_experts:
            raise ValueError(
                "shared_gate is true, but shared_experts is 0: state shared_experts, or leave shared_gate out"
            )
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than experts {self.experts}: lower it")
        self._check_dense_layers()
        self.router.check_groups(self.experts, self.expert_groups, self.top_groups, self.top_k)

    def _check_dense_layers(self) -> None:
        if self.dense_layers >= self.layers:
            raise ValueError(
                f"dense_layers {self.dense_layers} leave none of {self.layers} layers to the {self.experts} experts: "
                f"lower dense_layers, or leave experts out"
            )
        if self.layers % self.experts_every:
            raise ValueError(
                f"layers {self.layers} is not a multiple of experts_every {self.experts_every}: layers with experts "
                f"and those between come in whole turns"
            )
        if self.dense_layers and self.experts_every > 1:
            raise ValueError(
                f"dense_layers is {self.dense_layers} and experts_every {self.experts_every}: layers without experts "
                f"come first or in turns, leave one of the two out"
            )

    @property
    def main_kind(self) -> LayerKind:
        """The kind of all layers but the first dense ones, or of every n-th."""
        return "experts" if self.experts else "dense"

    @property
    def kinds(self) -> dict[LayerKind, int]:
        """How many layers there are of each kind, the first ones first."""
        main = (self.layers - self.dense_layers) // self.experts_every
        counts: dict[LayerKind, int] = {"dense": self.layers - main, self.main_kind: main}
        return {kind: count for kind, count in counts.items() if count}

    @property
    def traits(self) -> dict[str, object]:
        """Fields by which this model differs from GPT-2's, BLOOM's and Llama's kind, which software may lack.

        A stretch of rotary angles of which the numbers are known is one with them, and else one by its name.
        """
        found = {name: value for name, plain in PLAIN.items() if (value := getattr(self, name)) != plain}
        if self.rotary_yarn is not None:
            del found["rotary_stretch"]
        return found | ({"mlp": self.mlp} if self.mlp in ("geglu", "relu2") else {})

    @property
    def attention_hidden(self) -> int:
        """Width of the concatenated heads (equals hidden in all but a few models)."""
        return self.heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Features of a head that rotary positions turn: its first ones, of latent attention its last."""
        if self.latent_attention is not None:
            return self.latent_attention.rotary_dim
        return int(self.head_dim * self.rotary_share)

    @property
    def biased_attention(self) -> AttentionBias:
        """Which of attention's matrices have biases."""
        return self.attention_bias or ("all" if self.bias else "none")

    def window_of(self, layer: int) -> int:
        """Tokens that a token attends to in a layer, counted from 0; 0: all before it."""
        every = self.full_attention_every
        return 0 if every and (layer + 1) % every == 0 else self.sliding_window

    @property
    def kv_hidden(self) -> int:
        """Width of the keys (and of the values)."""
        return self.kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Features of a head's values."""
        return self.head_dim if self.latent_attention is None else self.latent_attention.value_dim

    @property
    def context_hidden(self) -> int:
        """Width of what the heads give together."""
        return self.heads * self.value_dim

    @property
    def layer_shape(self) -> tuple[object, ...]:
        """All that one layer's work depends on; equal for models that differ in depth, vocabulary or name alone."""
        sizes = self.hidden, self.heads, self.kv_heads, self.head_dim, self.ffn_hidden
        kinds = self.positions, self.norm, self.mlp, self.activation, self.bias, self.dropout
        return (*sizes, *kinds, *(getattr(self, name) for name in PLAIN))

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP multiplies an activated gate with its other half."""
        return self.mlp in GATED

    @property
    def mlp_matrices(self) -> int:
        """Weight matrices of one MLP: 2, or 3 when gated."""
        return 3 if self.gated_mlp else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention."""
        sinks = self.heads if self.attention_sinks else 0
        if self.latent_attention is not None:
            return self.latent_attention.parameters(self.hidden, self.heads) + sinks
        h, a, kv = self.hidden, self.attention_hidden, self.kv_hidden
        biases = {"none": 0, "qkv": a + 2 * kv, "all": a + 2 * kv + h}[self.biased_attention]
        return h * a + 2 * h * kv + a * h + biases + self.qk_norm_parameters + sinks

    def mlp_parameters(self, width: int) -> int:
        """Parameters of an MLP of an inner `width`."""
        biases = width * (self.mlp_matrices - 1) + self.hidden if self.bias else 0
        return self.mlp_matrices * self.hidden * width + biases

    @property
    def mixture_parameters(self) -> int:
        """Parameters of one layer's router, routed experts and shared experts, these as one MLP of their width."""
        shared = self.mlp_parameters(self.shared_experts * self.moe_ffn_hidden) if self.shared_experts else 0
        gate = self.hidden if self.shared_gate else 0
        return self.router_parameters + self.expert_parameters + shared + gate

    @property
    def expert_parameters(self) -> int:
        """Parameters of one layer's routed experts."""
        return self.experts * self.mlp_parameters(self.moe_ffn_hidden)

    @property
    def uncut_parameters(self) -> int:
        """Parameters of one layer of experts that all TP ranks hold: the router, and latent attention's way down."""
        return self.router_parameters + self.uncut_attention_parameters

    @property
    def uncut_attention_parameters(self) -> int:
        """Parameters of one layer's attention that all TP ranks hold: latent attention's way down."""
        latent = self.latent_attention
        return 0 if latent is None else self.hidden * (latent.query_rank + latent.kv_rank + latent.rotary_dim)

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's router."""
        return self.experts * (self.hidden + (1 if self.bias else 0))

    @property
    def layer_parameters(self) -> int:
        """Parameters of one transformer layer with a dense MLP, biases and norms included."""
        norms = self.norms * self.norm_parameters
        return self.attention_parameters + self.mlp_parameters(self.ffn_hidden) + norms

    @property
    def mixture_layer_parameters(self) -> int:
        """Parameters of one transformer layer with a mixture of experts."""
        return self.layer_parameters - self.mlp_parameters(self.ffn_hidden) + self.mixture_parameters

    @property
    def joining_parameters(self) -> int:
        """Parameters of a module for a further token beside its layer: a product of 2 h x h and three norms."""
        return 2 * self.hidden * self.hidden + 3 * self.norm_parameters

    @property
    def norms(self) -> int:
        """Normalisations of the hidden state in one layer."""
        return 4 if self.norm_placement == "both" else 2

    @property
    def qk_norm_parameters(self) -> int:
        """Parameters of one layer's norms of queries and keys, which all heads share where each is normed alone."""
        widths = {"none": 0, "head": 2 * self.head_dim, "all_heads": self.attention_hidden + self.kv_hidden}
        return widths[self.qk_norm] * self.norm_parameters // self.hidden

    @property
    def norm_parameters(self) -> int:
        """Parameters of one normalisation."""
        return 2 * self.hidden if self.norm == "layernorm" else self.hidden

    def embedding_parameters(self) -> int:
        """Token embedding (vocabulary padded for one rank), positions and embedding norm."""
        positions = self.max_positions * self.hidden if self.positions == "learned" else 0
        norm = self.norm_parameters if self.embedding_norm else 0
        return padded_vocab(self.vocab, 1) * self.hidden + positions + norm

    def head_parameters(self) -> int:
        """Parameters of an untied output matrix; 0 when it is tied or there is none."""
        if self.head == "classifier" or self.tied_embedding:
            return 0
        return padded_vocab(self.vocab, 1) * self.hidden

    @property
    def unpadded_parameters(self) -> int:
        """All parameters, as those who publish the model count them: the vocabulary without padding."""
        matrices = 1 if self.tied_embedding or self.head == "classifier" else 2
        return self.parameters - matrices * (padded_vocab(self.vocab, 1) - self.vocab) * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, with the vocabulary padded for one device; modules for further tokens are not counted."""
        mixtures = self.kinds.get("experts", 0)
        return (
            (self.layers - mixtures) * self.layer_parameters
            + mixtures * self.mixture_layer_parameters
            + self.embedding_parameters()
            + self.head_parameters()
            + self.norm_parameters
        )


# The fields by which other families differ from GPT-2, BLOOM and Llama.
_TRAITS = (
    "attention_bias", "qk_norm", "norm_placement", "parallel_residual", "rotary_share", "rotary_stretch",
    "rotary_yarn", "sliding_window", "full_attention_every", "query_scale", "attention_softcap", "logit_softcap",
    "scaled_embedding", "attention_sinks", "swiglu_limit", "latent_attention", "experts", "top_k", "moe_ffn_hidden",
    "shared_experts", "dense_layers", "experts_every", "expert_groups", "top_groups", "shared_gate", "router",
    "uncounted",
)  # fmt: skip
# What a model of those kinds has in them: their defaults.
PLAIN: Mapping[str, object] = {name: Model.model_fields[name].get_default() for name in _TRAITS}
