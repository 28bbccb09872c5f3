"""How the tables of the programs that need no report of their own look."""

from evidence.tables import Table

CONVERT = Table(
    "commands",
    ("command, in this order", "GB/s", "of the `cp` before and after (aim 0.5)", "peak memory, GB", "bound, GB"),
    ("{}", "{:.2f}", "{:.2f}", "{:.2f}", "{:.2f}"),
)
SHARES = Table(
    "shares",
    ("done by all processes together", "GB that a process reads", "of its share (aim 1.1)", "GB that it writes",
     "of its share", "memory beyond what it holds, in layers (aim 2)", "s"),
    ("{}", "{:.2f}", "{:.2f}", "{:.2f}", "{:.2f}", "{:.2f}", "{:.0f}"),
)  # fmt: skip
LLM_SPEED = Table(
    "speed",
    ("4 × 512 tokens, float32", "moe_jax, tokens/s", "Transformers, tokens/s", "compiled, tokens/s",
     "ratio to the faster", "of the products alone", "of what these allow (aim 0.95)"),
    ("{}", *("{:.0f} ({:.0f})",) * 3, *("{:.2f} ({:.2f})",) * 3),
)  # fmt: skip
LLM_DECODING = Table(
    "decoding",
    ("rows", "moe_jax, tokens/s", "Transformers, tokens/s", "compiled, tokens/s", "ratio to the faster (aim 1.5)"),
    ("{}", *("{:.1f} ({:.1f})",) * 3, "{:.2f} ({:.2f})"),
)
LLM_START = Table("start", ("command", "first time, s", "second time, s (aim 3)"), ("{}", "{:.1f}", "{:.1f}"))
LM_EVAL_LIKELIHOODS = Table(
    "log-likelihoods",
    ("task", "items", "log-likelihoods", "largest difference (aim 0.001)", "greedy or not alike", "accuracy",
     "accuracy of `hf`"),
    ("{}", "{}", "{:,}", "{:.1e}", "{} of {}", "{:.4f} ± {:.4f}", "{:.4f} ± {:.4f}"),
)  # fmt: skip
LM_EVAL_EXACT = Table(
    "exact",
    ("task", "items", "largest difference from `hf` in float64 (aim 0.001)", "of `hf` in float32"),
    ("{}", "{}", "{:.1e}", "{:.1e}"),
)
LM_EVAL_TEXTS = Table("texts", ("task", "items", "tokens", "texts alike (aim: all)"), ("{}", "{}", "{:,}", "{} of {}"))
VLLM = Table(
    "exports",
    (
        *("export", "codes", "Transformers, nats", "vLLM, nats", "difference [95 %]", "greedy tokens alike, %"),
        "versions, kernels of experts",
    ),
    ("{}", "{}", "{:.4f}", "{:.4f}", "{}", "{:.0f}", "{}"),
)
UPCYCLED = Table("models", ("model", "parameters added", "held-out loss"), ("{}", "{:,}", "{:.4f}"))
LAYER_TIME = Table("time", ("experts", "top-1", "top-2", "top-4"), ("{}", "{:.2f}", "{:.2f}", "{:.2f}"))
LAYER_MEMORY = Table(
    "memory",
    ("experts", "parameters", "parameters and AdamW", "temporaries", "peak"),
    ("{}", "{:,}", "{:.0f}", "{:.0f}", "{:.0f}"),
)


LAYER_RESTORED = Table(
    "restored",
    ("residuals of all experts", "to restore them, ms", "the layer, ms", "of the layer"),
    ("{}", "{:.0f}", "{:.0f}", "{:.2f}"),
)


def layer_decoding(tokens: int) -> Table:
    """Decoding of so many tokens."""
    head = ("experts", "MB read", "of full", "ms", "of full")
    return Table(f"decode {tokens}", head, ("{}", "{:.0f}", "{:.2f}", "{:.1f}", "{:.2f}"))


TRUE_LAYERS = Table(
    "layers",
    ("layer", "experts", "minutes", "aim", "greatest resident memory, GB", "aim", "rounds of alignment",
     "objective above that of the planted orders"),
    ("{}", "{}", "{:.2f}", "{:g}", "{:.2f}", "{:g}", "{}", "{:+.3%}"),
)  # fmt: skip
TRUE_EXACT = Table(
    "exact",
    ("layer of independent experts", "objective above the exact searches' (aim 0.1 %)", "minutes", "rounds",
     "exact searches, minutes", "rounds", "gap of the proof, of the objective"),
    ("{}", "{:+.3%}", "{:.2f}", "{}", "{:.1f}", "{}", "{:.1e}"),
)  # fmt: skip
TRUE_CALIBRATED = Table(
    "calibrated",
    ("layer", "method", "minutes", "aim", "minutes of the processor", "minutes, all experts",
     "greatest resident memory, GB", "aim", "GB of the layer", "error of outputs"),
    ("{}", "{}", "{:.2f}", "{:g}", "{:.2f}", "{:.0f}", "{:.2f}", "{:g}", "{:.3f}", "{:.4f}"),
)  # fmt: skip
TRUE_PROGRAMS = Table(
    "programs",
    ("device", "method", "program", "runs for a layer", "arguments, MiB", "temporaries, MiB",
     "operations of products, 10⁹", "least time, ms", "of all runs, s"),
    ("{}", "{}", "{}", "{:,}", "{:,.0f}", "{:,.0f}", "{:,.1f}", "{:,.2f}", "{:,.2f}"),
)  # fmt: skip
PEFT_STEP = Table(
    "step",
    ("", "trained", "held, MiB", "temporaries, MiB", "peak, of full", "time, of full"),
    ("{}", "{:,}", "{:.0f}", "{:.0f}", "{:.2f}", "{:.2f}"),
)
PEFT_LINEAR = Table(
    "linear",
    ("rank", "GFLOP", "W + AB made: GFLOP", "MiB", "W + AB made: MiB"),
    ("{}", "{:.2f}", "{:.2f}", "{:.0f}", "{:.0f}"),
)
POD_STEPS = Table(
    "steps",
    ("recipe", "experts", "topology", "mesh", "parameters and optimizer, GiB per chip", "in all", "of",
     "collectives, GB a step", "products, ms", "memory, ms", "links, ms", "least time of a step, ms",
     "utilisation at most"),
    ("{}", "{}", "{}", "{}", "{:.1f}", "{:.1f}", "{:.0f}", "{:.1f}", "{:.0f}", "{:.0f}", "{:.0f}", "{:.0f}", "{:.0%}"),
)  # fmt: skip
POD_SCALING = Table(
    "scaling",
    ("chips", "mesh", "in all, GiB per chip", "least time of a step, ms", "utilisation at most",
     "collectives, GB a step"),
    ("{}", "{}", "{:.1f}", "{:.0f}", "{:.0%}", "{:.1f}"),
)  # fmt: skip
POD_EXCHANGES = Table(
    "exchanges",
    ("chips along `expert`", "rows that a chip sends to experts, GB a step", "least time of a step, ms"),
    ("{}", "{:.2f}", "{:.0f}"),
)
DATA_PIPELINE = Table(
    "speed",
    ("data", "tokens", "batches from its files", "from files of tokens", "`data tokenize`, 1 process", "2 processes"),
    ("{}", "{:,}", "{:,.0f}", "{:,.0f}", "{:,.0f}", "{:,.0f}"),
)
ATTACKS = Table(
    "classes",
    (
        "inputs", "tried", "refused", "read", "executed", "files elsewhere", "silently wrong", "hangs", "> 500 MB",
        "tracebacks", "messages too long",
    ),
    ("{}", *["{:,}"] * 10),
)  # fmt: skip
ATTACK_BOUNDS = Table(
    "bounds",
    ("inputs", "tried", "bounds", "most processor time", "most memory", "over the bounds", "silently wrong",
     "tracebacks"),
    ("{}", "{:,}", "{:g} s, {:.0f} MB", "{:.2f} s", "{:.0f} MB", *["{:,}"] * 3),
)  # fmt: skip
ATTACK_FAULTS = Table(
    "faults", ("bound taken out", "noticed by", "inputs until harm was done", "harm"), ("{}", "{}", "{:,}", "{}")
)
KILLS = Table(
    "kills",
    ("command, killed at random times", "kills", "given again until done", "found work to go on with", "bit-identical",
     "anything else"),
    ("{}", *["{:,}"] * 5),
)  # fmt: skip
FULL_DISKS = Table(
    "full disks",
    ("command, on a full disk", "sizes", "kept work to go on with", "one line, then bit-identical", "anything else"),
    ("{}", *["{:,}"] * 4),
)
TWO_AT_A_TIME = Table(
    "two at a time", ("two processes on", "trials", "as it should be", "anything else"), ("{}", *["{:,}"] * 3)
)
REAL_MODEL_FILES = Table(
    "files",
    ("converted from", "leaves with other numbers", "largest difference of a logit"),
    ("{}", "{} of {}", "{:.2g}"),
)
REAL_MODEL_TEXT = Table(
    "text",
    ("converted from", "texts with equal tokens", "greedy continuations equal to Transformers'", "nll",
     "Transformers' nll", "difference of the perplexities"),
    ("{}", "{} of {}", "{} of {}", "{:.6f}", "{:.6f}", "{:.1e}"),
)  # fmt: skip
FAMILIES_CONVERTED = Table(
    "converted",
    ("family", "convert → export bit for bit", "loss as drawn", "trained", "trained, in Transformers"),
    ("{}", "{}", "{:.3f}", "{:.3f}", "{}"),
)
FAMILIES_UPCYCLED = Table(
    "upcycled",
    ("family", "upcycled", "largest change of a logit", "loss before", "trained", "exported, in Transformers"),
    ("{}", "{}", "{:.0e}", "{:.3f}", "{:.3f}", "{}"),
)
VISION_ADDED = Table(
    "added parameters",
    ("language model", "experts", "added, MoE-LLaVA", "added, Med-MoE without its universal FFNs",
     "its universal FFNs", "DeRS's paper"),
    ("{}", "{}", "{:,}", "{:,}", "{:,}", "{}"),
)  # fmt: skip
VISION_PARTS = Table("eye", ("part", "parameters"), ("{}", "{:,}"))
ENCODER_DECODERS = Table(
    "encoder-decoders",
    ("model", "nll of the answers", "right answers", "95 % interval, %", "exported, in Transformers"),
    ("{}", "{:.3f}", "{} of {}", "{:.1f} – {:.1f}", "{}"),
)
VISION_STEP = Table(
    "steps",
    ("step", "chips", "rows", "GB of a chip", "it has", "the tower's share of the operations", "arrays [T, T]",
     "largest array"),
    ("{}", "{}", "{}", "{:.1f}", "{:.1f}", "{:.2%}", "{}", "{}"),
)  # fmt: skip
VISION_TOWER = Table(
    "towers",
    ("tower", "", "pictures", "ms", "Transformers, ms", "speed, of Transformers' (aim 0.85)"),
    ("{}", "{}", "{}", "{:.0f}", "{:.0f}", "{:.2f}"),
)
PICTURES_READ = Table(
    "read",
    ("pictures of 640 x 480", "", "number", "for a second of one core (aim 80)"),
    ("{}", "{}", "{}", "{:.0f}"),
)
PICTURE_SHARE = Table(
    "share of the tower",
    ("features", "epoch", "seconds of a step", "of which the tower, against the last row"),
    ("{}", "{}", "{:.2f}", "{:.1%}"),
)
FAMILIES_COMPRESSED = Table(
    "compressed and tuned",
    ("family", "", "bytes", "loss before", "after", "exported, in Transformers"),
    ("{}", "{}", "{:.2f}", "{:.3f}", "{:.3f}", "{}"),
)
DELTA_TIMES = Table(
    "times",
    ("2 × 1024 tokens, float32", "Transformers, s", "ours, s", "times as fast (aim 1.5)"),
    ("{}", "{:.2f}", "{:.2f}", "{:.1f}"),
)
DELTA_COMPILED = Table(
    "compiled",
    ("program", "arguments, MiB", "temporaries, MiB", "largest array"),
    ("{}", "{:,.0f}", "{:,.0f}", "{}"),
)
COMPILED_LAYERS = Table(
    "layers",
    ("device", "layer", "program", "arguments, MiB", "temporaries, MiB", "largest array of floats", "kernels called"),
    ("{}", "{}", "{}", "{:,.0f}", "{:,.0f}", "{}", "{}"),
)
HOT_PATH = Table(
    "layers",
    ("chip", "shape", "experts", "strategy", "GB moved", "least", "of the least (aim 1.3)",
     "kernels alone, of the least", "FLOP per byte", "fast memory of kernels, MiB", "least time, ms",
     "share of products"),
    ("{}", "{}", "{}", "{}", "{:.2f}", "{:.2f}", "{:.2f}", "{:.2f}", "{:.0f}", "{:.0f}", "{:.2f}", "{:.2f}"),
)  # fmt: skip
HOT_PATH_AGAINST = Table(
    "against",
    ("chip", "shape", "experts", "of one dense FFN (low-rank: aim 1.2)", "of one dense FFN per row multiplied",
     "of full experts"),
    ("{}", "{}", "{}", "{:.2f}", "{:.2f}", "{:.2f}"),
)  # fmt: skip
GPU_LAYERS = Table(
    "layers",
    ("shape", "experts", "strategy", "forward, ms", "with gradients, ms", "forward, of the cost model's",
     "with gradients, of one dense FFN", "with gradients, of ragged_dot"),
    ("{}", "{}", "{}", "{:.2f}", "{:.2f}", "{:.2f}", "{:.2f}", "{:.2f}"),
)  # fmt: skip
SERVING = Table(
    "requests",
    ("seats", "requests at once", "tokens", "seconds", "tokens per second", "of one request on this server",
     "of one request on a server of one seat (aim 3)"),
    ("{}", "{}", "{}", "{:.2f}", "{:.1f}", "{:.2f}", "{:.2f}"),
)  # fmt: skip
SERVING_BEFORE = Table(
    "before",
    ("seats", "requests at once", "older commit", "seconds", "seconds of the older one", "ratio of a round, median",
     "least", "greatest", "rounds"),
    ("{}", "{}", "{}", "{:.2f}", "{:.2f}", "{:.3f}", "{:.3f}", "{:.3f}", "{}"),
)  # fmt: skip
DECODING_SPEED = Table(
    "speed",
    ("model", *(f"{rows}, tokens/s (of bfloat16)" for rows in ("1 row", "4 rows", "16 rows")),
     "500 tokens read, s (of bfloat16)", "scored, tokens/s (of bfloat16)"),
    ("{}", *["{:.1f} ({:.2f})"] * 3, "{:.2f} ({:.2f})", "{:.0f} ({:.2f})"),
)  # fmt: skip
DECODING_MEMORY = Table(
    "memory",
    ("model", "file, MB", "loaded, MB", "process after 64 tokens, MB", "of which neither weights nor Python, MB",
     "of bfloat16"),
    ("{}", "{:.0f}", "{:.0f}", "{:.0f}", "{:.0f}", "{:.2f}"),
)  # fmt: skip
TRUE_DECODING = Table(
    "tokens",
    (
        "layer",
        "experts",
        "MB",
        "1 token, ms",
        "of bfloat16",
        "4 tokens, ms",
        "of bfloat16, 4 tokens",
        "16 tokens, ms",
        "of bfloat16, 16 tokens",
    ),
    ("{}", "{}", "{:.0f}", *("{:.2f}",) * 6),
)
SCORED_ANSWERS = Table(
    "shares",
    ("tokens scored, %", "seconds", "seconds with all logits", "ratio of a round, median", "least", "greatest",
     "largest relative difference of a gradient"),
    ("{:.0f}", "{:.2f}", "{:.2f}", "{:.3f}", "{:.3f}", "{:.3f}", "{:.1e}"),
)  # fmt: skip
GGUF_TYPES = Table(
    "types",
    ("type", "MB", "nats per token, ours", "llama.cpp's", "awkward texts with equal tokens", "tokens/s, ours",
     "llama.cpp's"),
    ("{}", "{:.1f}", "{:.4f}", "{:.4f}", "{}", "{:.1f}", "{:.1f}"),
)  # fmt: skip
GGUF_KINDS = Table(
    "kinds",
    ("small random model, F32", "largest difference of a logit", "largest logit"),
    ("{}", "{:.1e}", "{:.1f}"),
)
GGUF_QUANTISED = Table(
    "quantised",
    ("type", "MB, ours", "llama.cpp's", "nats per token, quantised here", "by llama.cpp"),
    ("{}", "{:.1f}", "{:.1f}", "{:.4f}", "{:.4f}"),
)
FOUR_BITS = Table(
    "four bits",
    ("the same MoE", "MB", "nats per token", "more than in bfloat16 [95 %]", "most likely token alike, %",
     "greedy tokens alike, %", "made by"),
    ("{}", "{:.1f}", "{:.4f}", "{}", "{}", "{}", "{}"),
)  # fmt: skip
PLAN_TRAIN = Table(
    "cases",
    ("SmolLM2-135M, 2 × 256 tokens, float32", "foretold, GB", "measured, GB", "difference, % (aim 15)",
     "foretold, tokens/s", "measured, tokens/s", "difference, % (aim 15)"),
    ("{}", "{:.2f}", "{:.2f}", "{:+.1f}", "{:.0f}", "{:.0f}", "{:+.1f}"),
)  # fmt: skip
DEMO_MODELS = Table(
    "models",
    (
        *("model", "parameters", "MB", "of its experts, MB", "bits per weight of these", "held-out perplexity"),
        "above the uncompressed, nats per token",
    ),
    ("{}", "{:,}", "{:.1f}", "{:.1f}", "{:.2f}", "{:.3f}", "{:+.4f}"),
)
DEMO_VISION_MODELS = Table(
    "models",
    ("model", "parameters", "MB", "of its experts, MB", "right answers", "questions", "tokens per second"),
    ("{}", "{:,}", "{:.1f}", "{:.1f}", "{}", "{}", "{:.0f}"),
)
DEMO_WAITS = Table(
    "waits",
    (
        "model",
        *("first token, s", "all tokens, s"),
        *("first token of the second start, s", "all tokens of the second start, s"),
        *("tokens", "tokens per second once compiled"),
    ),
    ("{}", "{:.1f}", "{:.1f}", "{:.1f}", "{:.1f}", "{}", "{:.0f}"),
)
DEMO_STEPS = Table("steps", ("step", "seconds"), ("{}", "{:.0f}"))
