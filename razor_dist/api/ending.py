"""How a chat template ends a prompt: fields of a chat and of ``/tokenize``."""

from __future__ import annotations

from razor_dist.api.fields import Strict
from razor_dist.config.errors import RequestError


class Ending(Strict):
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def ending(self) -> dict[str, bool]:
        """The arguments of the chat template, as transformers calls it."""
        if self.continue_final_message:
            return {"add_generation_prompt": False, "continue_final_message": True}
        return {"add_generation_prompt": self.add_generation_prompt is not False}

    def check_ending(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "continue_final_message goes on with the last message, and add_generation_prompt "
                "begins another: one of them must be false or left out",
                param="continue_final_message",
            )
