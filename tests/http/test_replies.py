from __future__ import annotations

from trioengine.http.replies import new_head


def test_a_head_has_an_id_of_its_own_that_says_what_it_is_of() -> None:
    head = new_head("chatcmpl-", "m", "f")
    assert head.id.startswith("chatcmpl-")
    assert head.id != new_head("chatcmpl-", "m", "f").id
    assert (head.model, head.system_fingerprint) == ("m", "f")
