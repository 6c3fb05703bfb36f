"""A method of drafting that the package does not know. It proposes, on the host, what followed the last two tokens.

python examples/own_drafter.py [--model smollm2-135m] [--max-tokens 64]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.speculate import registry
from slipstream.speculate.host_staged import HostStagedSpeculator
from slipstream.speculate.method import DraftMethod
from slipstream.speculative_config import Needs


class Echo(DraftMethod):
    name = "echo"
    # Four drafts by default; they follow from the text alone, and the host proposes them.
    needs = Needs(default_drafts=4, is_certain=True, host_drafts=True)
    model = None  # no network of its own

    def read_model(self, given: Any) -> None:
        """It takes no checkpoint."""

    def think_on_host(self, config: Any) -> Echo:
        return self

    def propose(self, request_id: str, token_ids: Sequence[int], count: int) -> list[int]:
        """What followed the last place at which these two tokens were; nothing if there is none."""
        for end in range(len(token_ids) - 1, 1, -1):
            if list(token_ids[end - 2 : end]) == list(token_ids[-2:]):
                return list(token_ids[end : end + count])
        return []

    def open(self, config: Any, target: Any) -> Echo:
        return self

    def build(self, config: Any, device: Any, target: Any) -> Any:
        return lambda rows, caches: HostStagedSpeculator(config, device)  # places on the device what `propose` gives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    registry.register(Echo())
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    with LLM(options.model, speculate="echo", k=4, max_num_seqs=1) as llm:
        output = llm.generate("red, green, blue, red, green, blue, red,", params)[0]
        print(output.text)
        print(f"{llm.stats.num_accepted_tokens} of {llm.stats.num_draft_tokens} drafts accepted")


if __name__ == "__main__":
    main()
