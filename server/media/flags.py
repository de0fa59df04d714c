"""The flags that say where pictures and videos may come from, and how many a prompt may have."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from jaxspec.config.flags import checked, natural
from server.http.cors import names
from server.media.pictures import MediaRules

_HOST = re.compile(r"[a-z0-9_.-]+(:\d{1,5})?|\[?[0-9a-f:.]+\]?")
_folder = checked(lambda text: Path(text).expanduser(), "must be a folder that is there", Path.is_dir)


def add_media_flags(group: argparse._ArgumentGroup) -> None:
    hosts = "hosts that media are fetched from, as '[\"a.example\"]' or one name; none are private (default: none)"
    group.add_argument("--allowed-media-domains", type=_hosts, default=[], metavar="LIST", help=hosts)
    folder = "folder whose pictures and videos requests may name by path or file: URL (default: none)"
    group.add_argument("--allowed-media-path", type=_folder, metavar="DIR", help=folder)
    most = "most pictures of a prompt; 0 refuses all (default: %(default)s)"
    group.add_argument("--limit-images-per-prompt", type=natural, default=MediaRules.most, metavar="N", help=most)
    most = "most videos of a prompt; 0 refuses all (default: %(default)s)"
    group.add_argument("--limit-videos-per-prompt", type=natural, default=MediaRules.videos, metavar="N", help=most)


def media_rules(args: argparse.Namespace) -> MediaRules:
    most = args.limit_images_per_prompt, args.limit_videos_per_prompt
    return MediaRules(frozenset(args.allowed_media_domains), args.allowed_media_path, *most)


def _hosts(text: str) -> list[str]:
    hosts = [name.lower().rstrip(".") for name in names(text)]
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise argparse.ArgumentTypeError(
                f"takes host names, as images.example.com, without a scheme or *, got {host!r}"
            )
    return [host.strip("[]") for host in hosts]  # a URL's host is an IPv6 address without brackets
