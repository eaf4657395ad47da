"""`forerun train`: a head or a draft model for a target, from nothing but the target itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from draft.head_checkpoint import TargetTables
from draft.training.course import Course, HeadPlan
from draft.training.draft_model_module import DraftShape
from draft.training.draft_model_training import train_draft_model
from draft.training.eagle3_training import paper_layers, train_eagle3
from draft.training.feature_store import FeatureStore, StoreFormat
from draft.training.head_export import STORAGES
from draft.training.medusa_training import train_medusa
from draft.training.prompts import ChatTokens, read_prompts
from draft.training.texts import Texts
from draft.training.trainer import TrainSettings
from speculation.distill import BATCH, make_prompts, record_answers
from speculation.progress import progress_bar
from target.embedded import embedded_model_dir
from target.errors import CheckpointError
from target.fingerprint import model_fingerprint
from target.hf_config import read_config
from target.load import load_runner
from target.runner import Runner

BLOCK_SIZE = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Generate, record, train, write. 2 for bad input; run again with the same arguments, it goes on where it was."""
    arguments = _parser().parse_args(argv)
    try:
        _run(arguments)
    except (ValueError, CheckpointError, OSError) as error:
        sys.stderr.write(f"forerun train: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("forerun train: stopped; the same command goes on from here\n")
        return 130
    return 0


def _run(arguments: argparse.Namespace) -> None:
    target_dir = embedded_model_dir() if arguments.target == "embedded" else Path(arguments.target).expanduser()
    tables = TargetTables.of(target_dir)
    shape = DraftShape(arguments.hidden_size, arguments.layers)
    layers = _layers(arguments, tables.config.num_layers) if arguments.method == "eagle3" else ()
    work = arguments.work or Path(f"{arguments.out}.work")
    work.mkdir(parents=True, exist_ok=True)
    fingerprint = model_fingerprint(target_dir, dtype=arguments.dtype, quantization=arguments.quantization)
    form = StoreFormat(fingerprint, (*layers, -1), tables.config.hidden_size)
    store = FeatureStore(work / "store", form, max_bytes=int(arguments.max_disk_gb * 1e9))
    texts = Texts(arguments.texts) if arguments.texts else None
    _record(arguments, target_dir, store, work, fingerprint, texts)
    record = {
        "command": f"forerun train --target {target_dir.name} --method {arguments.method} --seed {arguments.seed}",
        "target": target_dir.name,
        "target_fingerprint": fingerprint,
        "num_sequences": len(store.sequences),
        "num_tokens": store.num_tokens,
        "num_prompts": arguments.num_prompts,
        "num_text_prompts": arguments.num_text_prompts if texts else 0,
        "texts": texts.names if texts else [],
        "max_answer_tokens": arguments.max_answer_tokens,
    }
    settings = TrainSettings(
        num_epochs=arguments.epochs,
        batch_pairs=arguments.batch_pairs,
        learning_rate=arguments.learning_rate,
        validate_every=arguments.validate_every,
        is_bfloat16=arguments.bfloat16,
        max_seconds=arguments.max_seconds,
        seed=arguments.seed,
    )
    course = Course(
        store=store,
        tables=tables,
        plan=HeadPlan(layers, arguments.vocabulary, arguments.steps, arguments.storage, not arguments.share_rows),
        settings=settings,
        work=work,
        out=arguments.out,
        record=record,
        target_name=target_dir.name,
        progress=partial(progress_bar, "updates"),
        note=tqdm.write,
    )
    if arguments.method == "draft_model":
        train_draft_model(course, shape, target_dir)
    else:
        {"eagle3": train_eagle3, "medusa": train_medusa}[arguments.method](course)


def _record(
    arguments: argparse.Namespace,
    target_dir: Path,
    store: FeatureStore,
    work: Path,
    fingerprint: str,
    texts: Texts | None,
) -> None:
    """Prompts and answers, as far as they are missing."""
    chat = ChatTokens(target_dir)
    runner: Runner | None = None
    path = arguments.prompts
    if path is None:
        path = work / "prompts.jsonl"
        runner = _runner(arguments, target_dir)
        with progress_bar("prompts", arguments.num_prompts) as bar:
            make_prompts(
                runner, chat, path, arguments.num_prompts, seed=arguments.seed, fingerprint=fingerprint, progress=bar
            )
    prompts = [chat.conversation(messages) for messages in read_prompts(path)[: arguments.num_prompts]]
    if texts is not None:
        prompts += map(chat.whole_turn, texts.prompts(arguments.num_text_prompts, arguments.seed))
    with progress_bar("recorded tokens") as bar:
        record_answers(
            runner or _runner(arguments, target_dir),
            prompts,
            store,
            max_answer_tokens=arguments.max_answer_tokens,
            seed=arguments.seed,
            fingerprint=fingerprint,
            progress=bar,
        )


def _runner(arguments: argparse.Namespace, target_dir: Path) -> Runner:
    """The target, with room for all sequences of a batch at about 1,000 tokens each."""
    length = read_config(target_dir).max_model_len
    return load_runner(
        target_dir,
        num_blocks=1 + BATCH * min(length, 1024) // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        device=arguments.device,
        dtype=arguments.dtype,
        backend=arguments.backend,
        quantization=arguments.quantization,
    )


def _layers(arguments: argparse.Namespace, num_layers: int) -> tuple[int, ...]:
    if arguments.feature_layers is None:
        return paper_layers(num_layers)
    layers = tuple(int(part) for part in arguments.feature_layers.split(","))
    if not all(0 <= layer <= num_layers for layer in layers):
        raise ValueError(f"--feature-layers is {arguments.feature_layers}; the target has layers 0 to {num_layers}")
    return layers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forerun train",
        description="Train what drafts for a target, on the target's own answers. Run again, it goes on.",
    )
    parser.add_argument("--target", default="embedded", help='a Hugging Face folder, or "embedded" (default: embedded)')
    parser.add_argument(
        "--method",
        choices=["eagle3", "medusa", "draft_model"],
        default="eagle3",
        help="what is trained (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the head to")
    parser.add_argument("--work", type=Path, help="folder of recordings and unfinished training (default: OUT.work)")
    parser.add_argument("--prompts", type=Path, help="file with one prompt a line (default: the target makes its own)")
    parser.add_argument(
        "--num-prompts", type=int, default=4000, help="prompts to make or to take (default: %(default)s)"
    )
    parser.add_argument(
        "--texts",
        type=Path,
        nargs="+",
        help="text files or folders; tasks over their passages are asked as well",
    )
    parser.add_argument(
        "--num-text-prompts", type=int, default=2000, help="tasks to make of --texts (default: %(default)s)"
    )
    parser.add_argument(
        "--max-answer-tokens", type=int, default=128, help="maximum tokens of an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--max-disk-gb", type=float, default=8.0, help="maximum disk space for recordings, in GB (default: %(default)s)"
    )
    parser.add_argument("--feature-layers", help="target layers to read, as in 2,15,27 (default: the paper's)")
    parser.add_argument(
        "--vocabulary", type=int, default=16384, help="size of the head's vocabulary (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="positions ahead that it learns to guess (default: %(default)s)"
    )
    parser.add_argument(
        "--hidden-size", type=int, default=160, help="hidden size of a draft model (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=3, help="layers of a draft model (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the recordings (default: %(default)s)")
    parser.add_argument("--batch-pairs", type=int, default=1024, help="tokens of one update (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="peak learning rate (default: %(default)s)")
    parser.add_argument(
        "--bfloat16", action="store_true", help="train in bfloat16, which is faster where the processor supports it"
    )
    parser.add_argument(
        "--validate-every", type=int, default=200, help="updates between two validations (default: %(default)s)"
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        help="stop training after this many seconds; the same command continues it (default: unset)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of prompts, answers and initial weights (default: %(default)s)"
    )
    parser.add_argument(
        "--storage",
        choices=STORAGES,
        default="float16",
        help="number format of the written matrices (default: %(default)s)",
    )
    parser.add_argument("--share-rows", action="store_true", help="share the target's output rows: half the file size")
    parser.add_argument("--device", default="auto", help="device, such as cpu or cuda:0 (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="number format of the target: auto, float32, bfloat16 or float16 (default: %(default)s)",
    )
    parser.add_argument(
        "--backend", default="auto", help="code that runs the target, as in serve --help (default: %(default)s)"
    )
    parser.add_argument(
        "--quantization",
        default="auto",
        help="how the target's weights are stored, as in serve --help (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
