"""Tenants: who is told apart by which header or key, what each may do, and that none learns of another's prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from multidict import CIMultiDict

from cache_store.block_pool import BlockPool
from cache_store.hashing import block_hashes, root_hash
from service.errors import ApiError
from service.pool.cache_statistics import OTHERS, CacheStatistics
from service.pool.routing import LeastTtft
from service.pool.settings import PoolSettings, TenantSettings
from service.tenants import PUBLIC, Tenant, Tenants
from tests.service.conftest import StartService
from tests.service.pool.conftest import READY, make_pool, output, submit

TEXT = "/v1/completions"
HEADER = TenantSettings(tenant_header="X-Tenant")
PROXY = TenantSettings(tenant_header="X-Tenant", operator_header="X-Operator")
ROOT = {"X-Operator": "true"}
BODY: dict[str, Any] = {"prompt": list(range(3, 67)), "max_tokens": 3}


@pytest.fixture
def keys(tmp_path: Path) -> TenantSettings:
    """Two tenants and an operator."""
    path = tmp_path / "keys"
    path.write_text("# who asks\nalice  key-of-alice\nbob key-of-bob\n\nroot key-of-root operator\n")
    return TenantSettings(api_keys_file=str(path))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_settings_there_are_no_tenants() -> None:
    """Everybody is an operator, and a request's own salt stands."""
    tenants = Tenants.load(TenantSettings())
    tenant = tenants.author({})
    assert tenant == Tenant(is_operator=True)
    assert tenant.name == ""
    assert tenants.salt(tenant, "mine") == "mine"


def test_a_salt_is_the_tenant_s_whatever_he_asks_for() -> None:
    """Two tenants never have the same salt, the same tenant always has, and what he wants divides his own alone."""
    tenants = Tenants.load(HEADER)
    alice, bob = (tenants.author({"X-Tenant": name}) for name in ("alice", "bob"))
    assert tenants.salt(alice, "") == Tenants.load(HEADER).salt(alice, "")
    salts = {
        tenants.salt(tenant, wanted)
        for tenant in (alice, bob, Tenant(member="alicebob", is_operator=False), Tenant(key="alice", is_operator=False))
        for wanted in ("", "bob", tenants.salt(bob, ""), "licebob")
    }
    assert len(salts) == 16


def test_header_and_key_together_make_a_tenant(keys: TenantSettings) -> None:
    """Behind a proxy with a key of its own a tenant is both, and is no operator even by the operator's key."""
    tenants = Tenants.load(msgspec.structs.replace(keys, tenant_header="X-Tenant"))
    tenant = tenants.author({**bearer("key-of-root"), "X-Tenant": "alice"})
    assert tenant == Tenant(key="root", member="alice", is_operator=False)
    assert tenant.name == "root/alice"
    assert tenants.identify(bearer("key-of-root")).is_operator
    with pytest.raises(ApiError, match="X-Tenant must name the tenant"):
        tenants.author(bearer("key-of-root"))


@pytest.mark.parametrize("value", ["", "a b", "ü", "x" * 257, "evil,alice", "alice,"])
def test_a_tenant_has_a_plain_name(value: str) -> None:
    """What no header value should be is refused, naming the header."""
    with pytest.raises(ApiError, match="X-Tenant must be 1 to 256 visible ASCII characters"):
        Tenants.load(HEADER).author({"X-Tenant": value})


def test_key_and_header_are_told_apart(keys: TenantSettings) -> None:
    """No split of one name into key and header, nor one of the two alone, has the salt of another."""
    tenants = Tenants.load(keys)
    pairs = [("a", "b/c"), ("a/b", "c"), ("a/b/c", ""), ("", "a/b/c"), ("a", "b"), ("b", "a"), ("ab", ""), ("", "ab")]
    salts = {tenants.salt(Tenant(key=key, member=member, is_operator=False), "") for key, member in pairs}
    assert len(salts) == len(pairs)


def test_a_key_s_name_has_no_slash_beside_the_header(tmp_path: Path) -> None:
    """Where key and tenant are shown as one, "a/b" and "c" would read as "a" and "b/c": the file is refused."""
    path = tmp_path / "keys"
    path.write_text("a/b key\n")
    assert Tenants.load(TenantSettings(api_keys_file=str(path))).author(bearer("key")).name == "a/b"
    with pytest.raises(ValueError, match="line 1: beside tenant_header a name must have no '/'"):
        Tenants.load(TenantSettings(api_keys_file=str(path), tenant_header="X-Tenant"))


@pytest.mark.parametrize(
    ("settings", "name"),
    [(HEADER, "X-Tenant"), (PROXY, "X-Operator"), (None, "Authorization")],
    ids=["tenant", "operator", "key"],
)
def test_a_header_that_decides_is_there_once(keys: TenantSettings, settings: TenantSettings | None, name: str) -> None:
    """A client whose proxy appends to what it sent does not choose which value counts."""
    tenants = Tenants.load(settings or keys)
    headers = CIMultiDict([("X-Tenant", "alice"), (name, "1"), (name.lower(), "1")])
    with pytest.raises(ApiError, match=f"{name} is there more than once") as caught:
        tenants.identify(headers)
    assert caught.value.status == 400


async def test_two_tenant_headers_are_refused_on_the_wire(start_service: StartService) -> None:
    """Two lines of the header, or one with a comma, are answered 400 and nothing is generated."""
    service = await start_service(tenants=HEADER)
    for headers in (
        CIMultiDict([("X-Tenant", "evil"), ("X-Tenant", "alice")]),
        CIMultiDict([("X-Tenant", "evil,alice")]),
    ):
        status, answer = await service.post(TEXT, BODY, headers=headers)
        assert (status, answer["error"]["param"]) == (400, "X-Tenant")
    assert service.front.cache.total.requests == 0


async def test_who_names_no_tenant_may_nothing(start_service: StartService) -> None:
    """With the tenants' header alone nobody is an operator, and without it every route but probes answers 401."""
    service = await start_service(tenants=HEADER)
    for path in ("/v1/models", "/v1/cache", "/v1/engines", "/v1/engine", "/v1/stream", "/v1/speculation", "/v1/none"):
        status, answer = await service.get(path)
        assert (status, answer["error"]["code"]) == (401, "tenant_required"), path
    assert (await service.post("/v1/engines/engine-0/drain", {}))[0] == 401
    for path in ("/v1/cache", "/v1/engines"):
        status, answer = await service.get(path, headers={"X-Tenant": "alice"})
        assert (status, answer["error"]["code"]) == (403, "operators_only")
    for path in ("/health/live", "/health/ready", "/metrics"):
        assert (await service.get(path))[0] == 200
    assert (await service.get("/v1/models", headers={"X-Tenant": "alice"}))[0] == 200


@pytest.mark.parametrize(
    ("settings", "headers", "may_operate"),
    [
        (TenantSettings(), {}, True),
        (HEADER, {"X-Tenant": "alice"}, False),
        (PROXY, {"X-Tenant": "alice"}, False),
        (PROXY, {"X-Tenant": "alice", "X-Operator": "true"}, True),
        (PROXY, {"X-Operator": "1"}, True),
        (PROXY, {"X-Tenant": "alice", "X-Operator": "false"}, False),
        (TenantSettings(operator_header="X-Operator"), {}, False),
        (TenantSettings(operator_header="X-Operator"), {"X-Operator": "0"}, False),
        (TenantSettings(operator_header="X-Operator"), {"X-Operator": "True"}, True),
    ],
)
def test_who_is_an_operator(settings: TenantSettings, headers: dict[str, str], *, may_operate: bool) -> None:
    """Everybody without any setting; else who is marked by the operators' header, and nobody without one."""
    assert Tenants.load(settings).identify(headers).is_operator is may_operate


def test_an_operator_s_mark_is_yes_or_no() -> None:
    """Any other value of the header is a mistake of the proxy's and is told, not taken for either."""
    with pytest.raises(ApiError, match='X-Operator is \'alice\'; it must be "true" or "false"'):
        Tenants.load(PROXY).identify({"X-Tenant": "alice", "X-Operator": "alice"})


def test_keys_and_the_operators_header_exclude_each_other(keys: TenantSettings) -> None:
    """Whoever has any key could send the header; so a service with both does not start."""
    with pytest.raises(ValueError, match="operator_header is set beside api_keys_file"):
        Tenants.load(msgspec.structs.replace(keys, operator_header="X-Operator"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no keys"),
        ("alice\n", "line 1: it must be NAME KEY"),
        ("alice key admin\n", "line 1: it must be NAME KEY"),
        ("# x\nalice key\nbob key\n", "line 3: the key is there twice"),
    ],
)
def test_a_key_file_that_is_wrong_is_told(tmp_path: Path, text: str, says: str) -> None:
    """The error names the file, the line and what is right, and no key."""
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        Tenants.load(TenantSettings(api_keys_file=str(path)))
    assert str(path) in str(caught.value)
    assert " key " not in str(caught.value).replace("the key is", "").replace("NAME KEY", "")


def test_a_missing_key_file_is_told(tmp_path: Path) -> None:
    """A service that was to ask for keys does not start without."""
    with pytest.raises(ValueError, match="No such file"):
        Tenants.load(TenantSettings(api_keys_file=str(tmp_path / "none")))


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(""), {"Authorization": "Basic key-of-alice"}])
async def test_without_a_key_nothing_is_served(
    start_service: StartService, keys: TenantSettings, headers: dict[str, str]
) -> None:
    """Every /v1 route answers 401 to a missing or wrong key; probes and Prometheus need none."""
    service = await start_service(tenants=keys)
    status, answer = await service.post(TEXT, BODY, headers=headers)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    for path in ("/v1/models", "/v1/engines", "/v1/cache", "/v1/stream", "/v1/nothing"):
        async with service.client.get(service.url + path, headers=headers) as response:
            assert response.status == 401, path
    for path in ("/health/live", "/health/ready", "/metrics"):
        assert (await service.get(path))[0] == 200


async def test_tenants_generate_and_operators_see_all(start_service: StartService, keys: TenantSettings) -> None:
    """A tenant's key generates and reads the models, and may not touch engines or see others; the operator's may."""
    service = await start_service(tenants=keys)
    alice, root = bearer("key-of-alice"), bearer("key-of-root")
    assert (await service.post(TEXT, BODY, headers=alice))[0] == 200
    async with service.client.get(f"{service.url}/v1/models", headers=alice) as response:
        assert response.status == 200
    async with service.client.ws_connect(f"{service.url}/v1/stream", headers=alice) as socket:
        await socket.send_json({"type": "generate", "id": "a", "request": BODY})
        assert (await socket.receive_json())["type"] == "started"
    for path in ("/v1/audit", "/v1/cache", "/v1/engine", "/v1/engines", "/v1/experiments"):
        async with service.client.get(service.url + path, headers=alice) as response:
            assert response.status == 403, path
            assert (await response.json())["error"]["code"] == "operators_only"
        async with service.client.get(service.url + path, headers=root) as response:
            assert response.status == 200, path
    async with service.client.get(f"{service.url}/v1/cache", headers=root) as response:
        assert {entry["tenant"] for entry in (await response.json())["tenants"]} >= {"alice"}


async def test_what_tenants_may_do_is_listed(start_service: StartService, keys: TenantSettings) -> None:
    """Of all routes these answer to a tenant's key; whatever is added is for operators until it is here."""
    service = await start_service(tenants=keys)
    allowed = set()
    for route in service.app.router.routes():
        path = route.resource.canonical if route.resource is not None else ""
        if path == "/" or path.startswith(PUBLIC):
            continue
        url = service.url + re.sub(r"\{[^}]+\}", "x", path)
        async with service.client.request(route.method, url, headers=bearer("key-of-alice"), data=b"{}") as response:
            if response.status != 403:
                allowed.add((route.method, path))
    read = {(method, path) for method, path in allowed if method in {"GET", "HEAD"}}
    assert {path for _, path in read} == {
        "/v1/models",
        "/v1/models/{name}",
        "/v1/speculation",
        "/v1/speculation/{name}",
        "/v1/stream",
        "/tokenizer_info",
    }
    generating = {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"}
    assert allowed - read == {("POST", path) for path in generating}
    assert set(PUBLIC) == {"/health", "/v1/health", "/ping", "/version", "/metrics", "/docs", "/page/"}


async def test_the_same_prompt_of_two_tenants_is_two_prompts(start_service: StartService) -> None:
    """Blocks are shared within a tenant and never between two, whatever salt a client sends."""
    service = await start_service(tenants=PROXY)

    async def held() -> int:
        (engine,) = (await service.get("/v1/engines", headers=ROOT))[1]["data"]
        return int(engine["blocks_held"])

    async def ask(tenant: str, **changes: Any) -> None:
        before = await held()
        assert (await service.post(TEXT, {**BODY, **changes}, headers={"X-Tenant": tenant}))[0] == 200
        await service.until_idle()
        grown.append(await held() - before)

    grown: list[int] = []
    await ask("alice")
    await ask("alice")
    await ask("bob")
    await ask("bob", cache_salt=service.front.tenants.salt(Tenant(member="alice", is_operator=False), ""))
    await ask("alice", cache_salt="apart")
    assert grown == [4, 0, 4, 4, 4]
    status, answer = await service.post(TEXT, BODY)
    assert (status, answer["error"]["code"]) == (401, "tenant_required")


def test_two_salts_share_no_hash_and_no_block() -> None:
    """In the engine's index, under every split of a prompt, what one salt stored is invisible to the other."""
    pool = BlockPool(64)
    token_ids = list(range(160))
    roots = [root_hash("model", salt) for salt in ("tenant a", "tenant b")]
    table = pool.open(roots[0])
    assert pool.reserve(table, len(token_ids))
    pool.commit(table, token_ids, len(token_ids))
    assert pool.match(roots[0], token_ids, len(token_ids)).num_tokens == 160
    assert pool.match(roots[1], token_ids, len(token_ids)).num_tokens == 0
    hashes = [set(block_hashes(root, token_ids, 16)) for root in roots]
    assert not hashes[0] & hashes[1]


async def test_a_probe_learns_nothing_of_another_tenant_s_prompt() -> None:
    """Where and after how much work a probe is answered is the same, whether another tenant had asked that or not."""

    async def probe(victim_prompt: list[int]) -> tuple[str, int, float]:
        pool = make_pool(2, LeastTtft())
        async with pool.pool.submit([submit("victim", prompt=victim_prompt, salt="tenant victim")]) as stream:
            pool.holder("victim").say(output("victim", 1, finish="stop"))
            await stream.take()
        pool.time[0] += 1.0
        guess = submit("probe", prompt=list(range(320)), salt="tenant spy")
        async with pool.pool.submit([guess]):
            holder = pool.holder("probe")
            flight = holder.member.flights["probe"]
            ttft = holder.member.load(0.0, 0.0).predict_ttft(0)
            return holder.member.engine_id, flight.num_uncached_tokens, ttft

    assert await probe(list(range(320))) == await probe(list(range(320, 0, -1)))
    assert READY.block_size == 16


async def test_hit_rates_by_tenant(start_service: StartService) -> None:
    """/v1/cache tells of each tenant how much was asked and found, what is hot, and what each engine holds."""
    service = await start_service(tenants=PROXY, pool=PoolSettings(engines=2))
    await service.until(lambda: len(service.front.client.serving) == 2)
    for tenant in ("alice", "alice", "bob"):
        assert (await service.post(TEXT, BODY, headers={"X-Tenant": tenant}))[0] == 200
    await service.until_idle()
    await service.front.popularity.flush()
    cache = (await service.get("/v1/cache", headers=ROOT))[1]
    assert [(entry["tenant"], entry["requests"], entry["prompt_tokens"]) for entry in cache["tenants"]] == [
        ("alice", 2, 128),
        ("bob", 1, 64),
    ]
    assert cache["tenants"][0]["hit_rate"] == cache["tenants"][0]["cached_tokens"] / 128
    (hot,) = cache["hot_prefixes"]
    assert (hot["num_tokens"], round(hot["uses"])) == (48, 1)
    assert sum(engine["blocks_held"] for engine in cache["engines"]) == 8
    assert cache["store"] == {"kind": "memory", "is_up": True, "failures": 0}


async def test_statistics_are_bounded() -> None:
    """However many tenants there are, the least recent are counted together and the sum stays right."""
    cache = CacheStatistics(max_tenants=10)
    for number in range(1000):
        cache.note(f"{number}", prompt_tokens=10, cached_tokens=4)
    assert len(cache.by_tenant) <= 11
    assert cache.by_tenant[OTHERS].requests + 10 == sum(use.requests for use in cache.by_tenant.values()) == 1000
    assert cache.total.hit_rate == 0.4
