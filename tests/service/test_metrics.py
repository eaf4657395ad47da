"""What `/metrics` says of an engine's drafts under the names of vLLM."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from service.metrics import ServiceMetrics
from service.pool.statistics import NOTHING
from tests.service.conftest import Service


def test_drafts_are_counted_under_the_names_of_vllm() -> None:
    """Counters, labels and positions from 0 are vLLM's; their values are those of our own names."""
    metrics = ServiceMetrics()
    metrics.engine.model_name = "tiny"
    metrics.engine.stats = msgspec.structs.replace(
        NOTHING,
        counters={"drafts": 5.0, "drafts:ngram": 5.0, "draft_tokens": 12.0, "accepted_tokens": 7.0},
        drafted_per_position=[5, 4, 3],
        accepted_per_position=[4, 3, 0],
    )
    labels = {"model_name": "tiny", "engine": "0"}
    families = [
        family
        for family in text_string_to_metric_families(metrics.render().decode())
        if family.name.startswith("vllm:")
    ]
    assert {family.type for family in families} == {"counter"}
    found = {
        (sample.name, sample.labels.pop("position", None)): (sample.labels, sample.value)
        for family in families
        for sample in family.samples
    }
    assert found == {
        ("vllm:spec_decode_num_drafts_total", None): (labels, 5.0),
        ("vllm:spec_decode_num_draft_tokens_total", None): (labels, 12.0),
        ("vllm:spec_decode_num_accepted_tokens_total", None): (labels, 7.0),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"): (labels, 4.0),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): (labels, 3.0),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "2"): (labels, 0.0),
    }


def test_tools_find_the_counters_before_the_first_draft() -> None:
    """An engine that has drafted nothing yet shows zeros, by which tools know that speculation is on."""
    metrics = ServiceMetrics()
    metrics.engine.stats = NOTHING
    lines = metrics.render().decode().splitlines()
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name=""} 0.0' in lines


async def test_the_counters_name_the_model(service: Service) -> None:
    """The label `model_name` is the name in /v1/models."""
    await service.post("/v1/completions", {"prompt": "The quick brown fox", "max_tokens": 2})
    await service.until(lambda: service.front.metrics.engine.stats is not None)
    lines = (await service.get("/metrics"))[1].splitlines()
    name = service.front.model.name
    assert any(
        line.startswith(f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="{name}"}}') for line in lines
    )
