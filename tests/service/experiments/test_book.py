from __future__ import annotations

import msgspec
import pytest

from service.errors import ApiError
from service.experiments import book as books
from service.experiments.book import Book, Changes
from service.experiments.model import Experiment
from service.experiments.store import Snapshot
from speculation.messages import NgramConfig, NoSpeculation, SpeculationConfig
from tests.service.experiments.traffic import NGRAM, PLAIN, definition


def any_config(_: SpeculationConfig) -> None:
    """Serves everything."""


def after(book: Book, *edits: Changes) -> Book:
    """The book once the changes are written."""
    documents = {name: data for name, data in books.encode(book.documents()).items() if data is not None}
    for edit in edits:
        for name, data in books.encode(edit).items():
            documents.pop(name, None)
            if data is not None:
                documents[name] = data
    return Book.decode(Snapshot(book.revision + 1, documents))


def created(book: Book | None = None, *, is_draft: bool = False, **changes: object) -> Book:
    book = book or Book()
    return after(book, books.create(book, definition(**changes), any_config, [], 10.0, is_draft=is_draft))


def refused(code: int, edit: object) -> str:
    with pytest.raises(ApiError) as caught:
        edit()  # type: ignore[operator]
    assert caught.value.status == code
    return caught.value.body.message


def lookup(book: Book) -> Experiment:
    return book.experiments["lookup"]


def test_a_profile_gets_a_version_for_every_change() -> None:
    """Another config is another version, the same config is not; the default is a name."""
    book = after(Book(), books.put_profile(Book(), "fast", NgramConfig(), 1.0, is_default=True))
    assert (book.profiles["fast"].version, book.default) == (1, "fast")
    assert books.put_profile(book, "fast", NgramConfig(), 2.0, is_default=None) == {}
    book = after(book, books.put_profile(book, "fast", NgramConfig(max_n=5), 2.0, is_default=None))
    assert (book.profiles["fast"].version, book.profiles["fast"].updated_at, book.default) == (2, 2.0, "fast")


def test_the_default_profile_cannot_be_deleted() -> None:
    """Deleting it is refused with what to do; another profile can be deleted; an unknown one is unknown."""
    book = after(Book(), books.put_profile(Book(), "fast", NgramConfig(), 1.0, is_default=True))
    assert "default" in refused(409, lambda: books.delete_profile(book, "fast"))
    assert "did you mean 'fast'" in refused(404, lambda: books.delete_profile(book, "fasd"))
    book = after(book, books.put_profile(book, "slow", NoSpeculation(), 1.0, is_default=True))
    assert "fast" not in after(book, books.delete_profile(book, "fast")).profiles


def test_profiles_and_experiments_are_bounded() -> None:
    """The 201st is refused."""
    book = Book()
    for number in range(books.MAX_PROFILES):
        book = after(book, books.put_profile(book, f"p{number}", NoSpeculation(), 1.0, is_default=None))
    refused(409, lambda: books.put_profile(book, "more", NoSpeculation(), 1.0, is_default=None))
    many = {f"e{number}": lookup(created()) for number in range(books.MAX_EXPERIMENTS)}
    full = msgspec.structs.replace(Book(), experiments=many)
    refused(409, lambda: books.create(full, definition(), any_config, [], 1.0, is_draft=True))


def test_a_created_experiment_runs_unless_it_is_a_draft() -> None:
    """Running ones have a start; a draft is started later, once."""
    assert (lookup(created()).status, lookup(created()).started_at) == ("running", 10.0)
    book = created(is_draft=True)
    assert (lookup(book).status, lookup(book).started_at) == ("draft", None)
    book = after(book, books.start(book, "lookup", 20.0))
    assert (lookup(book).status, lookup(book).started_at, lookup(book).revision) == ("running", 20.0, 2)
    assert "copy" in refused(409, lambda: books.start(book, "lookup", 30.0))


def test_a_second_experiment_on_the_same_traffic_is_refused() -> None:
    """The refusal names the first; on other traffic, as a draft, or after a stop there is room."""
    book = created(filter={"model": "a"})
    assert "'lookup'" in refused(409, lambda: created(book, name="second"))
    created(book, name="second", filter={"model": "b"})
    created(book, name="second", is_draft=True)
    created(after(book, books.stop(book, "lookup", 20.0, "enough")), name="second")


def test_two_experiments_never_share_a_salt() -> None:
    """The same definition assigned twice splits its units differently."""
    assert lookup(created()).salt != lookup(created()).salt


def test_names_are_not_used_twice() -> None:
    """Also a stopped experiment keeps its name, until it is deleted; one that runs cannot be."""
    book = created()
    assert "takes traffic" in refused(409, lambda: books.delete(book, "lookup"))
    book = after(book, books.stop(book, "lookup", 20.0, "enough"))
    assert "already" in refused(409, lambda: created(book))
    created(after(book, books.delete(book, "lookup")))


def test_what_ran_stays_as_it_was() -> None:
    """A draft can be replaced; a running or stopped experiment cannot: stop and copy."""
    draft = created(is_draft=True)
    changed = definition(min_samples=500)
    assert lookup(after(draft, books.replace(draft, changed, any_config, [], 20.0))).definition.min_samples == 500
    book = created()
    assert "copy" in refused(409, lambda: books.replace(book, changed, any_config, [], 20.0))


def test_a_promotion_can_be_taken_back() -> None:
    """Promoting an inline arm makes a profile of its config the default; rolling back restores the old one."""
    book = after(Book(), books.put_profile(Book(), "old", NoSpeculation(), 1.0, is_default=True))
    book = created(book, at_end={"action": "promote", "cool_down_seconds": 60})
    book = after(book, books.promote(book, "lookup", 1, 100.0, "faster", by_hand=False))
    promotion = lookup(book).promotion
    assert promotion is not None
    assert (book.default, promotion.previous, promotion.until) == ("lookup.ngram-8", "old", 160.0)
    assert book.profiles["lookup.ngram-8"].speculation == lookup(book).configs[1]
    assert lookup(book).is_cooling_down
    assert lookup(book).tally_key not in {lookup(created()).salt, lookup(book).salt}
    assert "roll back" in refused(409, lambda: books.delete_profile(book, "old"))
    back = after(book, books.roll_back(book, "lookup", 120.0, "slower"))
    assert (back.default, lookup(back).status) == ("old", "stopped")
    taken = lookup(back).promotion
    assert taken is not None
    assert (taken.rolled_back_at, taken.reason) == (120.0, "slower")


def test_a_rollback_leaves_a_newer_default_alone() -> None:
    """If somebody chose another default meanwhile, that stays; and a rollback happens once."""
    book = created()
    book = after(book, books.promote(book, "lookup", 1, 100.0, "faster", by_hand=False))
    book = after(book, books.put_profile(book, "mine", NoSpeculation(), 110.0, is_default=True))
    book = after(book, books.roll_back(book, "lookup", 120.0, "slower"))
    assert book.default == "mine"
    assert books.roll_back(book, "lookup", 130.0, "slower") == {}


def test_what_was_tested_is_what_is_promoted() -> None:
    """An arm's profile is used if it still holds what was tested, else the tested config gets a profile of its own."""
    book = after(Book(), books.put_profile(Book(), "fast", NgramConfig(), 1.0, is_default=None))
    book = created(book, arms=[PLAIN, {"name": "f", "profile": "fast"}])
    assert after(book, books.promote(book, "lookup", 1, 100.0, "", by_hand=True)).default == "fast"
    book = after(book, books.put_profile(book, "fast", NgramConfig(max_n=5), 2.0, is_default=None))
    book = after(book, books.promote(book, "lookup", 1, 100.0, "", by_hand=True))
    assert book.default == "lookup.f"
    assert book.profiles["lookup.f"].speculation == NgramConfig()


def test_stopping_a_cool_down_keeps_the_default() -> None:
    """It ends the watch, not the promotion; after that there is nothing to stop."""
    book = created()
    book = after(book, books.promote(book, "lookup", 1, 100.0, "faster", by_hand=True))
    book = after(book, books.stop(book, "lookup", 110.0, ""))
    assert (lookup(book).status, lookup(book).is_cooling_down, book.default) == ("promoted", False, "lookup.ngram-8")
    assert "nothing to stop" in refused(409, lambda: books.stop(book, "lookup", 120.0, ""))


def test_a_promotion_waits_for_its_traffic() -> None:
    """A stopped experiment cannot be promoted while another takes the traffic its cool-down needs; a draft never."""
    book = created()
    book = created(after(book, books.stop(book, "lookup", 20.0, "enough")), name="second")
    assert "'second'" in refused(409, lambda: books.promote(book, "lookup", 1, 30.0, "", by_hand=True))
    draft = created(is_draft=True)
    assert "draft" in refused(409, lambda: books.promote(draft, "lookup", 1, 30.0, "", by_hand=True))


def test_weights_move_only_while_it_runs() -> None:
    """New weights for an experiment that was stopped meanwhile change nothing."""
    book = created(arms=[PLAIN, NGRAM], allocation="adaptive")
    assert lookup(after(book, books.reweigh(book, "lookup", [0.2, 0.8]))).weights == [0.2, 0.8]
    stopped = after(book, books.stop(book, "lookup", 20.0, ""))
    assert books.reweigh(stopped, "lookup", [0.2, 0.8]) == {}
