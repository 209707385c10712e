"""Model: the shape of a transformer, and the counts that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from trimaran.nouns.latent_attention import LatentAttention
from trimaran.nouns.noun import Noun

Positions = Literal["learned", "rotary", "alibi"]
Norm = Literal["layernorm", "rmsnorm"]
Mlp = Literal["gelu", "swiglu", "geglu"]
Activation = Literal["gelu", "gelu_tanh"]
Head = Literal["vocabulary", "classifier"]
NormPlacement = Literal["before", "after", "both"]
QkNorm = Literal["none", "head", "all_heads"]
AttentionBias = Literal["none", "qkv", "all"]
RotaryStretch = Literal["none", "linear", "dynamic", "yarn", "longrope"]

MOST_LAYERS = 100_000
# What a model of GPT-2, BLOOM or Llama kind has in the fields by which other families differ from them.
PLAIN: Mapping[str, object] = {
    "attention_bias": None,
    "qk_norm": "none",
    "norm_placement": "before",
    "parallel_residual": False,
    "rotary_share": 1.0,
    "rotary_stretch": "none",
    "sliding_window": 0,
    "full_attention_every": 0,
    "query_scale": None,
    "attention_softcap": 0.0,
    "logit_softcap": 0.0,
    "scaled_embedding": False,
    "attention_sinks": False,
    "latent_attention": None,
    "experts": 0,
    "top_k": 0,
    "moe_ffn_hidden": 0,
    "shared_experts": 0,
    "dense_layers": 0,
}


def padded_vocab(vocab: int, tp: int) -> int:
    """Vocabulary rounded up to a multiple of 128 x TP, as Megatron-LM lays it out."""
    multiple = 128 * tp
    return -(-vocab // multiple) * multiple


class RotaryScaling(Noun):
    """How rotary frequencies are stretched to a longer context than the model was first trained on (Llama 3.1)."""

    factor: float = Field(ge=1)
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_positions: int = Field(gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor:g} is not above low_freq_factor {self.low_freq_factor:g}: "
                f"wavelengths between the two are blended"
            )
        return self


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
    mlp: Mlp = "gelu"
    activation: Activation = Field(
        default="gelu_tanh",
        description="GELU, exact or by tanh. Unstated: tanh, as GPT-2, GPT-3 and BLOOM have it; exact with rotary",
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
        self._check_experts()
        latent = self.latent_attention
        if latent is not None and self.head_dim != latent.head_dim:
            raise ValueError(
                f"head_dim {self.head_dim} is not latent_attention's plain_dim {latent.plain_dim} + rotary_dim "
                f"{latent.rotary_dim}: state their sum"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"head_dim {self.head_dim} is odd, and rotary positions turn features in pairs: make it even"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: "
                f"each key-value head serves a whole number of heads"
            )
        return self

    def _check_experts(self) -> None:
        sizes = {name: getattr(self, name) for name in ("top_k", "moe_ffn_hidden", "shared_experts", "dense_layers")}
        if not self.experts:
            for name, value in sizes.items():
                if value:
                    raise ValueError(f"{name} is {value}, but experts is 0: state experts, or leave {name} out")
            return
        for name in ("top_k", "moe_ffn_hidden"):
            if not sizes[name]:
                raise ValueError(f"experts is {self.experts}, but {name} is 0: state it")
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than experts {self.experts}: lower it")
        if self.dense_layers >= self.layers:
            raise ValueError(
                f"dense_layers {self.dense_layers} leave none of {self.layers} layers to the {self.experts} experts: "
                f"lower dense_layers, or leave experts out"
            )

    @property
    def not_computed(self) -> str | None:
        """The sentence on what of this model has no operators here, so that nothing plans or trains it, or None."""
        if self.experts:
            return (
                f"model.experts is {self.experts}, and mixtures of experts are counted, not yet planned or trained: "
                f"choose a dense model"
            )
        if self.latent_attention is not None:
            return (
                f"model.latent_attention has kv_rank {self.latent_attention.kv_rank}, and such models are counted, not "
                f"yet planned or trained: choose one without"
            )
        return None

    @property
    def traits(self) -> dict[str, object]:
        """Fields by which this model differs from GPT-2's, BLOOM's and Llama's kind, which software may lack."""
        found = {name: value for name, plain in PLAIN.items() if (value := getattr(self, name)) != plain}
        return found | ({"mlp": self.mlp} if self.mlp == "geglu" else {})

    @property
    def attention_hidden(self) -> int:
        """Width of the concatenated heads (equals hidden in all but a few models)."""
        return self.heads * self.head_dim

    @property
    def kv_hidden(self) -> int:
        """Width of the keys (and of the values)."""
        return self.kv_heads * self.head_dim

    @property
    def layer_shape(self) -> tuple[object, ...]:
        """All that one layer's work depends on; equal for models that differ in depth, vocabulary or name alone."""
        sizes = self.hidden, self.heads, self.kv_heads, self.head_dim, self.ffn_hidden
        kinds = self.positions, self.norm, self.mlp, self.activation, self.bias, self.dropout
        return (*sizes, *kinds, *(getattr(self, name) for name in PLAIN))

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP multiplies an activated gate with its other half."""
        return self.mlp != "gelu"

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
        of_attention = self.attention_bias or ("all" if self.bias else "none")
        biases = {"none": 0, "qkv": a + 2 * kv, "all": a + 2 * kv + h}[of_attention]
        return h * a + 2 * h * kv + a * h + biases + self.qk_norm_parameters + sinks

    def mlp_parameters(self, width: int) -> int:
        """Parameters of an MLP of an inner `width`."""
        biases = width * (self.mlp_matrices - 1) + self.hidden if self.bias else 0
        return self.mlp_matrices * self.hidden * width + biases

    @property
    def mixture_parameters(self) -> int:
        """Parameters of one layer's router, routed experts and shared experts, these as one MLP of their width."""
        router = self.experts * (self.hidden + (1 if self.bias else 0))
        shared = self.mlp_parameters(self.shared_experts * self.moe_ffn_hidden) if self.shared_experts else 0
        return router + self.experts * self.mlp_parameters(self.moe_ffn_hidden) + shared

    @property
    def layer_parameters(self) -> int:
        """Parameters of one transformer layer with a dense MLP, biases and norms included."""
        norms = self.norms * self.norm_parameters
        return self.attention_parameters + self.mlp_parameters(self.ffn_hidden) + norms

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

    def embedding_parameters(self, tp: int = 1) -> int:
        """Token embedding (vocabulary padded for `tp`), positions and embedding norm."""
        positions = self.max_positions * self.hidden if self.positions == "learned" else 0
        norm = self.norm_parameters if self.embedding_norm else 0
        return padded_vocab(self.vocab, tp) * self.hidden + positions + norm

    def head_parameters(self, tp: int = 1) -> int:
        """Parameters of an untied output matrix; 0 when it is tied or there is none."""
        if self.head == "classifier" or self.tied_embedding:
            return 0
        return padded_vocab(self.vocab, tp) * self.hidden

    @property
    def unpadded_parameters(self) -> int:
        """All parameters, as those who publish the model count them: the vocabulary without padding."""
        matrices = 1 if self.tied_embedding or self.head == "classifier" else 2
        return self.parameters - matrices * (padded_vocab(self.vocab, 1) - self.vocab) * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, with the vocabulary padded for one device."""
        in_place_of_mlp = self.mixture_parameters - self.mlp_parameters(self.ffn_hidden) if self.experts else 0
        return (
            self.layers * self.layer_parameters
            + (self.layers - self.dense_layers) * in_place_of_mlp
            + self.embedding_parameters()
            + self.head_parameters()
            + self.norm_parameters
        )
