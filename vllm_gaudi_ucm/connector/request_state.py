"""What the connector in the scheduler knows of a live request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_gaudi_ucm.connector.lookup import Lookup
    from vllm_gaudi_ucm.connector.metadata import BlockLoad
    from vllm_gaudi_ucm.connector.request_keys import RequestKeys


@dataclass
class RequestState:
    """may_be_sparse: as it said when it came; the next input of a session may say otherwise, and changes nothing.
    is_closed: nothing is loaded for it any more. saved: blocks that were sent, or found. is_whole: its next load
    leaves nothing in the store. has_records: the summaries of its prompt were offered."""

    request: Request
    keys: RequestKeys
    may_be_sparse: bool
    lookup: Lookup | None = None
    is_closed: bool = False
    loading: BlockLoad | None = None
    saved: int = 0
    is_whole: bool = False
    has_records: bool = False

    def drop_lookup(self) -> None:
        """What was asked of the store is asked anew, if at all."""
        if self.lookup is not None:
            self.lookup.is_wanted = False
        self.lookup = None
