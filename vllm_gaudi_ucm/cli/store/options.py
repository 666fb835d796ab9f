"""Which store a command looks at: `--store`, or its short forms `--path` and `--url`."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_gaudi_ucm.options.files import parse_json
from vllm_gaudi_ucm.store.options import FileStoreOptions, MemoryStoreOptions, RedisStoreOptions, resolve_store_options

AnyStoreOptions = MemoryStoreOptions | FileStoreOptions | RedisStoreOptions


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the three options, of which exactly one has to be given."""
    store = parser.add_mutually_exclusive_group(required=True)
    store.add_argument("--store", metavar="FILE|JSON", help="options of the store, as in kv_connector_extra_config")
    store.add_argument(
        "--path", type=Path, metavar="FOLDER", help="a file store; short for its other options' defaults"
    )
    store.add_argument("--url", metavar="URL", help="a Redis store, such as redis://127.0.0.1:6379/0")


def store_options(args: argparse.Namespace) -> AnyStoreOptions:
    """The options given. Raises `UcmConfigError`."""
    if args.path is not None:
        return resolve_store_options({"kind": "file", "path": str(args.path)})
    if args.url is not None:
        return resolve_store_options({"kind": "redis", "url": args.url})
    return resolve_store_text(args.store)


def resolve_store_text(text: str) -> AnyStoreOptions:
    """The options in JSON text or in the file at a path. Raises `UcmConfigError`."""
    return resolve_store_options(parse_json(text, key="store") if text.lstrip().startswith("{") else text)
