from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service import audit
from service.audit import Divergence, divergence_of
from speculation.messages import TokenLogprob
from tests.service.conftest import Service, StartService

TEXT = "/v1/completions"
BODY = {"prompt": "The quick brown fox", "max_tokens": 12, "ignore_eos": True}
ROW = TokenLogprob(-0.5, 1, [7, 8], [-0.5, -0.75])


async def audited(service: Service, number: int) -> None:
    await service.until(lambda: service.front.auditor.report.audited >= number)


@pytest.mark.parametrize(
    ("token_ids", "plain", "position", "pair", "gap"),
    [
        ([7, 7], [7, 7], None, None, None),
        ([7, 8], [7, 7], 1, (8, 7), 0.25),
        ([7, 9], [7, 7], 1, (9, 7), None),
        ([7, 7, 7], [7, 7], 2, (7, None), None),
        ([7], [7, 7], 1, (None, 7), None),
    ],
)
def test_the_first_difference_is_named(
    token_ids: list[int],
    plain: list[int],
    position: int | None,
    pair: tuple[int | None, int | None] | None,
    gap: float | None,
) -> None:
    """Position, both tokens and how far apart the target's logits are; an answer that ends early differs, too."""
    found = divergence_of(token_ids, plain, [ROW] * len(plain))
    if position is None or pair is None:
        assert found is None
    else:
        assert found == Divergence(position=position, token_id=pair[0], plain_token_id=pair[1], logit_gap=gap)


async def test_finished_requests_are_compared(start_service: StartService) -> None:
    """Each choice's tokens, those behind a stop string included, are what plain decoding gives: nothing diverges."""
    service = await start_service(audit_share=1.0)
    for changes in (
        {},
        {"n": 3},
        {"stop": " q"},
        {"max_tokens": 40, "ignore_eos": False},
        {"seed": 5, "min_tokens": 3},
    ):
        await service.post(TEXT, BODY | changes)
    await audited(service, 5)
    status, report = await service.get("/v1/audit")
    assert status == 200
    assert report == {"share": 1.0, "audited": 5, "diverged": 0, "waiting": 0, "dropped": 0, "divergences": []}
    _, text = await service.get("/metrics")
    assert "forerun_audited_requests_total 5.0" in text.splitlines()
    assert "forerun_audit_divergences_total 0.0" in text.splitlines()


async def test_what_users_are_told_leaves_the_audit_out(start_service: StartService) -> None:
    """Latencies, tokens, hit rates and hot prefixes are those of the three requests that users sent."""
    service = await start_service(audit_share=1.0)
    for _ in range(3):
        await service.post(TEXT, {"prompt": list(range(3, 43)), "max_tokens": 12, "ignore_eos": True})
    await audited(service, 3)
    _, text = await service.get("/metrics")
    found = {family.name: list(family.samples) for family in text_string_to_metric_families(text)}

    def count(name: str) -> float:
        return sum(sample.value for sample in found[name] if sample.name == f"{name}_count")

    # Three tokens a step: twelve are four outputs, with three gaps between them.
    assert count("forerun_inter_token_seconds") == 3 * 3
    assert [count(f"forerun_{name}_seconds") for name in ("ttft", "tpot", "end_to_end", "queue", "prefill")] == [3] * 5
    tokens = {sample.labels["kind"]: sample.value for sample in found["forerun_tokens"] if "kind" in sample.labels}
    assert (tokens["prompt"], tokens["completion"]) == (3 * 40, 3 * 12)
    await service.front.popularity.flush()
    _, cache = await service.get("/v1/cache")
    assert [tenant["requests"] for tenant in cache["tenants"]] == [3]
    assert len(cache["hot_prefixes"]) == 1


async def test_a_divergence_is_reported(start_service: StartService) -> None:
    """A request whose second token was wrong is found, named with both tokens, and counted in the metric."""
    service = await start_service(audit_share=1.0)
    status, body = await service.post(
        TEXT, BODY | {"speculation": "ngram", "cache_salt": "wrong", "return_token_ids": True}
    )
    assert status == 200
    await audited(service, 1)
    _, report = await service.get("/v1/audit")
    (found,) = report["divergences"]
    assert (report["diverged"], found["position"], found["method"]) == (1, 1, "ngram")
    assert found["token_id"] == body["choices"][0]["token_ids"][1]
    assert found["plain_token_id"] == found["token_id"] ^ 1
    assert found["generation"].startswith(body["id"])
    _, text = await service.get("/metrics")
    assert "forerun_audit_divergences_total 1.0" in text.splitlines()


async def test_a_divergence_ends_an_experiment(start_service: StartService) -> None:
    """The arm that gave a wrong token breaks the audit's guardrail, and is not promoted."""
    service = await start_service(audit_share=1.0)
    arms = [{"name": "plain", "speculation": {"method": "none"}}, {"name": "guess", "speculation": {"method": "ngram"}}]
    status, _ = await service.post("/v1/experiments", {"name": "exact", "arms": arms, "at_end": "promote"})
    assert status == 201
    for _ in range(12):
        await service.post(TEXT, BODY | {"cache_salt": "wrong"})
    await audited(service, 1)
    _, seen = await service.get("/v1/experiments/exact")
    assert seen["report"]["decision"] == "broken"
    assert not seen["report"]["is_safe_to_promote"]
    (rail,) = seen["report"]["guardrails"]
    assert (rail["arm"], rail["metric"], rail["state"]) == ("guess", "audit", "breaks")


async def test_plain_requests_and_cut_off_ones_are_not_audited(start_service: StartService) -> None:
    """There is nothing to compare where nothing was guessed."""
    service = await start_service(audit_share=1.0)
    await service.post(TEXT, BODY | {"speculation": "none"})
    assert service.front.auditor.report.waiting == 0


async def test_the_audit_gives_way(start_service: StartService) -> None:
    """While somebody is served nothing is run again; afterwards it is."""
    service = await start_service(audit_share=1.0)
    slow = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True, "cache_salt": "slow", "speculation": "none"}
    running = asyncio.create_task(service.post(TEXT, slow))
    await service.until(lambda: service.front.client.num_live == 1)
    await service.post(TEXT, BODY)
    await asyncio.sleep(audit.LOOK_SECONDS * (audit.QUIET_LOOKS + 2))
    assert (service.front.auditor.report.waiting, running.done()) == (1, False)
    await running
    await audited(service, 1)


async def test_what_waits_is_bounded(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest sample makes room for the newest, and is counted as dropped."""
    monkeypatch.setattr(audit, "MAX_WAITING_BYTES", 2 * audit.RECORD_BYTES)
    service = await start_service(audit_share=1.0)
    running = asyncio.create_task(
        service.post(TEXT, {"prompt": "hi", "max_tokens": 100, "ignore_eos": True, "cache_salt": "slow"})
    )
    await service.until(lambda: service.front.client.num_live == 1)
    for _ in range(4):
        await service.post(TEXT, BODY)
    report = service.front.auditor.report
    assert report.dropped > 0
    assert report.waiting + report.dropped == 4
    await running
