"""The page's files and routes: complete, self-contained, guarded; and the engine's numbers as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, get_args

import msgspec
import pytest
from yarl import URL

from draft.config import SingleConfig, SpeculationConfig
from service.chat_command import SOURCE_COLOURS
from service.page.routes import CONTENT_TYPES, load_files
from tests.service.conftest import Service, StartService

FILES = load_files()
TEXTS = {name: file.body.decode() for name, file in FILES.items()}
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js")}


class Fetched(NamedTuple):
    """An answer that was read."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def fetch(service: Service, path: str, **headers: str) -> Fetched:
    async with service.client.get(URL(f"{service.url}{path}", encoded=True), headers=headers) as response:
        return Fetched(response.status, response.headers, await response.read())


def token(name: str, ground: int) -> str:
    """A colour of the style sheet, on light (0) or dark (1) ground."""
    found = re.search(rf"--{name}: light-dark\((#\w{{6}}), (#\w{{6}})\)", TEXTS["style.css"])
    assert found is not None, name
    return found.groups()[ground]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours [WCAG 2.2]."""

    def luminance(colour: str) -> float:
        shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


async def test_the_page_is_guarded(service: Service) -> None:
    """The page may run, load and reach nothing but the service itself, and nobody may frame it."""
    response = await fetch(service, "/")
    assert (response.status, response.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(rule.split(" ", 1) for rule in response.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    sources = {name: value for name, value in policy.items() if name.endswith("-src") and name != "default-src"}
    assert set(sources.values()) == {"'self'"}
    assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_every_file_is_served_with_its_type_once(service: Service) -> None:
    """A file comes whole with its type; a browser that has it is told so."""
    for name, file in FILES.items():
        fetched = await fetch(service, f"/page/{name}")
        assert (fetched.status, fetched.body) == (200, file.body)
        assert fetched.headers["Content-Type"] == f"{CONTENT_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        again = await fetch(service, f"/page/{name}", **{"If-None-Match": fetched.headers["ETag"]})
        assert (again.status, again.body) == (304, b"")


async def test_files_come_compressed_to_those_who_take_it(service: Service) -> None:
    """A client that takes gzip gets that, another the file as it is; caches keep the two apart."""
    for accepted, encoding in (("gzip, deflate, br", "gzip"), ("identity", None)):
        fetched = await fetch(service, "/page/style.css", **{"Accept-Encoding": accepted})
        assert (fetched.headers.get("Content-Encoding"), fetched.headers["Vary"]) == (encoding, "Accept-Encoding")
        assert fetched.body == FILES["style.css"].body
        assert (int(fetched.headers["Content-Length"]) < len(fetched.body)) == (encoding is not None)


def test_modules_are_fetched_at_once() -> None:
    """Every module is named in the page itself, so that none waits until another one that imports it has come."""
    preloaded = re.findall(r'rel="modulepreload" href="page/([^"]+)"', TEXTS["index.html"])
    assert sorted(preloaded) == sorted(SCRIPTS.keys() - {"main.js"})


async def test_only_the_page_s_files_are_served(service: Service) -> None:
    """Source code and what lies elsewhere cannot be fetched."""
    for name in ("routes.py", "..%2froutes.py", "%2e%2e/routes.py", "../routes.py", "missing.js", "__init__.py"):
        fetched = await fetch(service, f"/page/{name}")
        assert fetched.status == 404, name
        assert msgspec.json.decode(fetched.body)["error"]["code"] == "unknown_url"


async def test_pages_of_others_change_nothing(service: Service) -> None:
    """What a browser posts for another origin is refused, whatever route; its own page and other clients are served."""
    body = {"prompt": "hi", "max_tokens": 1}
    for origin in ("http://evil.example", "null", "http://[::", service.url + ".evil.example"):
        for path in ("/v1/completions", "/v1/experiments", "/v1/experiments/x/promote"):
            status, answer = await service.post(path, body, headers={"Origin": origin, "Content-Type": "text/plain"})
            assert (status, answer["error"]["code"]) == (403, "foreign_origin")
    assert (await service.post("/v1/completions", body, headers={"Origin": service.url}))[0] == 200
    assert (await service.post("/v1/completions", body))[0] == 200


def test_every_reference_is_to_a_file_of_the_page() -> None:
    """What the page and its modules name exists, and every file is named by somebody."""
    named = {"index.html", "documents.css"}  # the style of the pages under /docs
    named |= {path.removeprefix("page/") for path in re.findall(r'(?:src|href)="([^#"]+)"', TEXTS["index.html"])}
    for text in SCRIPTS.values():
        named |= set(re.findall(r'from "\./([\w.]+)"', text)) | set(re.findall(r'"page/(\w+\.\w+)"', text))
    assert named - {"docs"} == set(FILES)


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_nothing_is_from_elsewhere(name: str) -> None:
    """No address of another host stands in any file; what XML calls its namespace is no address."""
    text = TEXTS[name].replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+", re.sub(r"(?m)(?:^|\s)//.*$", "", text)) == []


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_no_script_makes_markup_of_text(name: str) -> None:
    """Elements are made by name and texts set as text."""
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|srcdoc"
    assert re.findall(forbidden, SCRIPTS[name]) == []


def test_no_script_or_style_is_inline() -> None:
    """The page's own policy would refuse them."""
    page = TEXTS["index.html"]
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", page) == []
    assert re.findall(r"<script(?![^>]*\ssrc=)", page) == []


def test_forms_know_every_method_and_its_parameters() -> None:
    """What the page offers is read from the config types themselves."""
    schema = msgspec.json.decode(FILES["speculation.json"].body)
    for kind in get_args(SpeculationConfig):
        method = str(kind.__struct_config__.tag)
        definition = schema["$defs"][schema["discriminator"]["mapping"][method].rpartition("/")[2]]
        assert set(definition["properties"]) == {"method", *kind.__struct_fields__}
        assert definition["description"]


def test_every_proposer_has_a_colour_the_same_in_page_and_terminal() -> None:
    """A token looks the same wherever it is shown, and all sources look different."""
    methods = [str(kind.__struct_config__.tag) for kind in get_args(SingleConfig)]
    assert set(SOURCE_COLOURS) == set(methods)
    for method in methods:
        assert SOURCE_COLOURS[method] == (token(method, 0), token(method, 1))
        assert f'[data-source="{method}"]' in TEXTS["style.css"]
    assert len(set(SOURCE_COLOURS.values())) == len(methods)


@pytest.mark.parametrize("ground", [0, 1])
def test_everything_can_be_read(ground: int) -> None:
    """Text stands out from its ground by 4.5 to 1 at least, on light and on dark; marks and lines by 3 to 1."""
    grounds = [token(name, ground) for name in ("paper", "raised", "sunken")]
    for name in ("ink", "soft", "good", "bad", "warn"):
        assert min(contrast(token(name, ground), under) for under in grounds) >= 4.5, name
    assert contrast(token("on-accent", ground), token("accent", ground)) >= 4.5
    for name in (*SOURCE_COLOURS, "line-strong", "accent"):
        assert contrast(token(name, ground), token("raised", ground)) >= 3.0, name


async def test_the_engine_s_numbers_are_those_of_its_stats(service: Service) -> None:
    """Before any work there are none; afterwards they are what the engine told last."""
    status, view = await service.get("/v1/engine")
    assert (status, view["is_ready"], view["stats"]) == (200, True, None)
    assert view["model"]["methods"] == ["ngram", "none"]
    assert view["model"]["context_length"] == 256
    await service.post("/v1/completions", {"prompt": "hello there", "max_tokens": 9})
    await service.until_idle()
    _, view = await service.get("/v1/engine")
    assert view["stats"]["blocks_free"] == 999
    assert view["stats"]["skipped_drafts"] == {"disabled": 1}
    assert view["stats"]["accepted_per_position"] == [2, 1]
    (request,) = view["requests"]
    assert (request["completion_tokens"], request["method"], request["is_aborted"]) == (9, "auto", False)
    assert (request["experiment"], request["tenant"]) == (None, "")
    assert 0 < request["ttft"] <= request["end_to_end"]
    assert len(view["step_seconds_bounds"]) == len(view["stats"]["step_seconds_buckets"])


async def test_the_page_is_there_before_the_model(start_service: StartService) -> None:
    """While an engine loads, the page is served and says that nothing is ready yet."""
    service = await start_service(command=["sleep", "60"], wait=False)
    assert (await fetch(service, "/")).status == 200
    _, view = await service.get("/v1/engine")
    assert view == {**view, "is_ready": False, "model": None, "stats": None, "num_live": 0}


def test_a_file_s_tag_follows_its_content() -> None:
    """Two files differ in their tags, so a changed file is fetched again."""
    assert len({file.etag for file in FILES.values()}) == len(FILES)
    assert all(file.body for file in FILES.values())
