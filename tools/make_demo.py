"""Make firstlight/data/demo: a small random glm5_next in the layout of a release, with a real tokenizer.

    python tools/make_demo.py [OUT]

Offline and deterministic: one seed, uniform numbers from numpy's PCG64, a tokenizer trained on the
text below. transformers says which tensors the released layout has, and loads the result as a check.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

OUT = Path(__file__).resolve().parent.parent / "firstlight" / "data" / "demo"
SEED = 20
VOCAB_SIZE = 512
BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
IMAGE = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|video|>", "<|end_of_video|>")
SPECIAL = (PAD, BOS, EOS, *ROLES, *IMAGE)
# a word with the character before it, up to three digits, punctuation, line ends, spaces
WORDS = (r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
ID = {token: index for index, token in enumerate(SPECIAL)}

CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|' + message.role + '|>\\n' + message.content + '\\n' }}
    {%- if message.role == 'assistant' %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}"""

# written for this file, so that the tokenizer is the same wherever it is trained
CORPUS = """
A language model reads a text and says which token comes next. It does so again and again until the text ends.
The first light of a telescope is the first picture that it takes of the sky. Everything is checked before and after it.
On the day a model is released, somebody wants to run it. The weights are there, the code is not, and the day is short.
What is a model made of? Most of it is known: a norm, a mixer, another norm, a feed-forward, and a residual around both.
The mixer lets the tokens of a sequence talk to each other. The feed-forward works on every token alone.
Attention keeps a key and a value for each token and compares the query of this token with every key that came before.
A recurrent layer keeps one state instead. It forgets a little, writes a little, and reads what is left.
An index scores all the tokens and keeps the best of them, so that attention need only look at those that matter.
Experts share the work: the router chooses two of eight for each token, and one more is always there.
If two scores are equal, the smaller position wins. That is how the same question has the same answer everywhere.
The prompt can be cut into chunks of any size. One token at a time or all of them together, the result is the same.
Memory is handed out in pages and slots. Each of them has one owner, and the owner gives it back when the work is done.
Numbers are rounded, so there is a tolerance, and the tolerance has a reason. Nobody makes it larger to pass a test.
When something goes wrong, say what it was, where it was, why it was wrong, and what to try next.
The river runs past the mill and the meadow, under the old stone bridge, and then down to the harbour and the sea.
In the morning the fishermen brought bread, apples, cheese and tea, and they talked about the weather of the week.
It was raining on Monday, on Tuesday there was wind, and by Wednesday the children could play outside in the garden.
"Where are you going?" she asked. "I am going home," he said, "because it is late and the lamps have been lit."
There were 3 boats, 12 nets and 450 fish. At 7:30 the market opened; by 10:15 everything was sold for 1,280 crowns.
def add(first: int, second: int) -> int:
    return first + second

for number in range(10):
    if number % 2 == 0:
        print(number, "is even")
    else:
        print(number, "is odd")

Hello! How can I help you today? I would like to know how this works. Please tell me about the model, and thank you.
Yes, of course. No, not yet. Could you explain that again? Here is an example, and here is another one that is shorter.
"""


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE of VOCAB_SIZE entries trained on CORPUS; the special tokens have the lowest ids."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex("|".join(WORDS)), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, ID[BOS])])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: make it longer")
    return tokenizer


def make_config() -> dict[str, object]:
    """Return config.json in the spelling of the release: KDA, KDA, KDA, indexed attention, twice."""
    text = {
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 8,
        "layer_types": (["linear_attention"] * 3 + ["indexed_attention"]) * 2,
        "mlp_layer_types": ["dense"] + ["sparse"] * 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        # 128 columns and index groups of 32: the sizes that FP8 tiles and MXFP8 need
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 0,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
        # small enough to act on these weights
        "swiglu_limit": 1.0,
        "rms_norm_eps": 1e-05,
        "index_topk": 32,
        "index_head_dim": 32,
        "index_n_heads": 16,
        "index_kpool": 4,
        "index_kpool_always_select_tail": True,
        "hc_mult": 4,
        "hc_eps": 1e-06,
        "hc_sinkhorn_iters": 20,
        "linear_attn_config": {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": ID[BOS],
        "eos_token_id": [ID[EOS], ID["<|user|>"]],
        "pad_token_id": ID[PAD],
    }
    vision = {
        "model_type": "glm5_next_vision",
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": 64,
        "projection_intermediate_size": 32,
        "patch_size": 4,
        "image_size": 16,
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": text,
        "vision_config": vision,
        "image_start_token_id": ID["<|begin_of_image|>"],
        "image_token_id": ID["<|image|>"],
        "image_end_token_id": ID["<|end_of_image|>"],
        "video_start_token_id": ID["<|begin_of_video|>"],
        "video_token_id": ID["<|video|>"],
        "video_end_token_id": ID["<|end_of_video|>"],
        "tie_word_embeddings": False,
    }


# name -> (centre, spread): uniform in centre +- spread; the first match counts, nothing stays at 0 or 1
SPREADS = (
    # memory of a few to a few hundred tokens
    (r"dt_bias$", (-4.0, 2.0)),
    (r"norm\d?\.weight$|layernorm\.weight$|hc_\w+_scale$", (1.0, 0.3)),
    (r"e_score_correction_bias$", (0.0, 0.1)),
    (r"conv1d\.weight$", (0.0, 0.8)),
    (r"hc_\w+_base$|A_log$|compress_ape$|bias$", (0.0, 0.3)),
    (r"lm_head", (0.0, 0.5)),
    (r"", (0.0, 0.2)),
)
# what the release keeps in float32
FLOAT32 = re.compile(r"e_score_correction_bias$|conv1d\.weight$|dt_bias$|A_log$|hc_\w+_(base|scale)$")


def make_weights(config: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the released layout, drawn in the order of the names."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    tensors = {}
    for name, shape in sorted(released_shapes(config).items()):
        centre, spread = next(found for pattern, found in SPREADS if re.search(pattern, name))
        values = centre + spread * (2 * rng.random(shape) - 1)
        dtype = torch.float32 if FLOAT32.search(name) else torch.bfloat16
        tensors[name] = torch.from_numpy(values.astype(np.float32)).to(dtype)
    return tensors


def released_shapes(config: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors that transformers writes for a config."""
    model = transformers.Glm5NextForConditionalGeneration(transformers.Glm5NextConfig.from_pretrained(config))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", framework="pt") as file:
            names = file.keys()
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def write_text(out: Path) -> None:
    """Write everything but the weights."""
    out.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(out / "tokenizer.json"))
    ids = {"bos_token_id": ID[BOS], "eos_token_id": [ID[EOS], ID["<|user|>"]], "pad_token_id": ID[PAD]}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (("config", make_config()), ("generation_config", ids), ("tokenizer_config", tokenizer)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (out / "MODEL_CARD.md").write_text(CARD, encoding="utf-8")


def check(out: Path) -> None:
    """Exit unless transformers loads the folder with nothing missing and nothing left over."""
    _, info = transformers.Glm5NextForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    left = {key: sorted(info[key])[:3] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if left:
        raise SystemExit(f"transformers does not accept {out}: {left}")


def main() -> None:
    """Write the folder and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=OUT, metavar="OUT")
    out: Path = parser.parse_args().out
    write_text(out)
    transformers.logging.disable_progress_bar()
    weights = out / "model.safetensors"
    save_file(make_weights(out), weights, metadata={"format": "pt"})
    # the library keeps the file to its owner; it is installed for everyone
    weights.chmod(0o644)
    check(out)
    print(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 1e6:.2f} MB")


CARD = f"""# firstlight demo

A {VOCAB_SIZE}-token language model with random weights. It knows nothing and writes nonsense; it exists so that
every command of firstlight runs at once, offline, on a model with all the parts of a current hybrid.

| part | here | exercises |
|---|---|---|
| recurrent layers | 6 of 8: KDA, 4 heads of 16 | short convolution, bounded decay, delta rule |
| attention layers | 2 of 8: latent attention, no positions, keys of 24, values of 16 | paged latent cache of 128 |
| index | 16 heads of 32, pools of 4 tokens, 32 tokens kept | pooled keys, top-k, tail always kept |
| feed-forward | dense first, then 8 experts, 2 chosen, 1 shared | sigmoid router, selection bias, clamped SwiGLU |
| residual | hyper-connections, 4 streams | Sinkhorn mixing before and after every block |
| tokenizer | byte-level BPE, {VOCAB_SIZE} entries | characters split over tokens, a first token added by the file |
| chat template | system, user, assistant | Jinja, a role check, the generation prompt |
| vision tower | tiny, as the release has one | skipped with a notice: text only |

Layout and names are those of released glm5_next checkpoints: `Glm5NextForConditionalGeneration` of transformers
loads the folder as it is. Weights are bfloat16; the biases, decays and convolutions that a release keeps in float32
are float32. No parameter is all 0 or all 1, so that a part which is left out shows in the output.

Made by `tools/make_demo.py`: uniform random numbers from one seed, and a tokenizer trained on a page of text written
in that file. Running it again with the same library versions gives the same bytes.

Licence: Apache-2.0. Intended use: tests, demonstrations, a first look at a command. No other.
"""


if __name__ == "__main__":
    main()
