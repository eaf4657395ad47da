"""The name of a model whose operator gave it none."""

from __future__ import annotations

from service.served_model import default_name


def test_a_served_model_s_name_has_no_part_number() -> None:
    """Without a name of its own a model is called as its file, without the part and the suffix."""
    assert default_name("folder/mine-00001-of-00003.gguf") == "mine"
    assert default_name("folder/mine.Q4_1.gguf") == "mine.Q4_1"
    assert default_name("folder/mine-00001-of-00003") == "mine-00001-of-00003"
