"""The number of active nodes of a YARN cluster, as its ResourceManager gives it over HTTP.

Source: hadoop.apache.org, "ResourceManager REST API's" (cluster metrics), and ``yarn-default.xml`` for the settings.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from choros.errors import InvalidInputError

WAIT = 10.0  # seconds for one ResourceManager
_PATH = "/ws/v1/cluster/metrics"
_MAX_ANSWER_BYTES = 1 << 20  # bytes of an answer
_ALTERNATIVE = "or give the number itself, as in --nodes 4"
_QUERY = "--nodes auto asks YARN's ResourceManager"
_ADDRESS = "yarn.resourcemanager.webapp.address"


def active_nodes(address: str = "", environ: Mapping[str, str] | None = None, wait: float = WAIT) -> tuple[int, str]:
    """Ask YARN's ResourceManager how many nodes are active.

    Args:
        address: the ResourceManager's web address, as ``"head:8088"`` or a URL. Defaults to what ``yarn-site.xml`` has.
        environ: the environment, for ``HADOOP_CONF_DIR`` and ``YARN_CONF_DIR``. Defaults to that of this process.
        wait: seconds to wait for one ResourceManager. Defaults to 10.

    Returns:
        The number of nodes, and the URL that gave it.

    Raises:
        InvalidInputError: nothing says where the ResourceManager is, it gives no number in time, or no node is active.

    Example:
        >>> active_nodes("head.invalid:8088", wait=5.0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        choros.errors.InvalidInputError: --nodes auto asks YARN's ResourceManager for its active nodes. http://head.in...
    """
    urls = (_url(address),) if address else resource_managers(os.environ if environ is None else environ)
    failures = []
    for url in urls:
        count = _ask(url, wait)
        if isinstance(count, int):
            if count < 1:
                raise InvalidInputError(f"YARN has no active node ({url}): start its NodeManagers, {_ALTERNATIVE}")
            return count, url
        failures.append(f"{url}: {count}")
    raise InvalidInputError(
        f"{_QUERY} for its active nodes. {'; '.join(failures)}. Give another address by "
        f"--resource-manager HOST:PORT, {_ALTERNATIVE}"
    )


def resource_managers(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the URLs at which ResourceManagers may answer; several where the cluster has standby ones.

    Args:
        environ: the environment, for ``HADOOP_CONF_DIR`` and ``YARN_CONF_DIR``.

    Raises:
        InvalidInputError: there is no ``yarn-site.xml``, it cannot be read, or it does not have the address.

    Example:
        >>> resource_managers({})
        Traceback (most recent call last):
        ...
        choros.errors.InvalidInputError: --nodes auto asks YARN's ResourceManager, and nothing says where it is: set \
HADOOP_CONF_DIR to the directory of yarn-site.xml, give --resource-manager HOST:PORT, or give the number itself, as in \
--nodes 4
    """
    named = [Path(environ[name]) for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR") if environ.get(name)]
    files = [folder / "yarn-site.xml" for folder in named]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        missing = f" (there is no {' and no '.join(map(str, files))})" if files else ""
        raise InvalidInputError(
            f"{_QUERY}, and nothing says where it is{missing}: set HADOOP_CONF_DIR to the "
            f"directory of yarn-site.xml, give --resource-manager HOST:PORT, {_ALTERNATIVE}"
        )
    settings = _settings(file)
    secure = settings.get("yarn.http.policy") == "HTTPS_ONLY"
    key = _ADDRESS.replace("webapp.", "webapp.https.") if secure else _ADDRESS
    addresses = []
    for suffix in _suffixes(settings):
        host = settings.get(f"yarn.resourcemanager.hostname{suffix}", "")
        default = f"{host}:{8090 if secure else 8088}" if host else ""
        addresses.append(_resolved(settings.get(f"{key}{suffix}", default), settings))
    if not all(addresses):
        raise InvalidInputError(
            f"{_QUERY}, and {file} has no {key}, nor yarn.resourcemanager.hostname: give "
            f"--resource-manager HOST:PORT, {_ALTERNATIVE}"
        )
    return tuple(_url(address, "https" if secure else "http") for address in addresses)


def _suffixes(settings: Mapping[str, str]) -> list[str]:
    """Return what follows the names of settings: "" or, with standby ResourceManagers, ".rm1", ".rm2" ..."""
    names = re.split(r"[\s,]+", settings.get("yarn.resourcemanager.ha.rm-ids", "").strip())
    several = settings.get("yarn.resourcemanager.ha.enabled", "").lower() == "true"
    return [f".{name}" for name in names if name] if several and any(names) else [""]


def _resolved(text: str, settings: Mapping[str, str]) -> str:
    """Return a value with ``${name}`` replaced by that setting, as Hadoop does; "" if one is not set."""
    names = re.findall(r"\$\{([^}]*)\}", text)
    if not all(settings.get(name) for name in names):
        return ""
    return re.sub(r"\$\{([^}]*)\}", lambda name: settings[name[1]], text)


def _settings(file: Path) -> dict[str, str]:
    from xml.etree import ElementTree

    try:
        root = ElementTree.parse(file).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise InvalidInputError(
            f"{_QUERY}, whose address is in {file}, which cannot be read ({error}): give "
            f"--resource-manager HOST:PORT, {_ALTERNATIVE}"
        ) from None
    pairs = ((prop.findtext("name"), prop.findtext("value")) for prop in root.iter("property"))
    return {name.strip(): value.strip() for name, value in pairs if name and value}


def _url(address: str, scheme: str = "http") -> str:
    """Return the URL of the metrics of a ResourceManager.

    Example:
        >>> _url("head:8088"), _url("https://head:8090/")
        ('http://head:8088/ws/v1/cluster/metrics', 'https://head:8090/ws/v1/cluster/metrics')
    """
    base = address if re.match(r"https?://", address) else f"{scheme}://{address}"
    return base.rstrip("/").removesuffix(_PATH) + _PATH


@dataclass
class _Answer:
    """The body or the failure of a request, once it has ended."""

    body: bytes = b""
    failure: str = "no answer"
    ended: threading.Event = field(default_factory=threading.Event)


def _ask(url: str, wait: float) -> int | str:
    """Return the number of active nodes, or why there is none.

    The request has a thread: a look-up of a host's name has no limit of time, and that of urllib is for each read.
    """
    answer = _Answer()
    threading.Thread(target=_fetch, args=(url, wait, answer), name="choros-yarn", daemon=True).start()
    if not answer.ended.wait(wait):
        return f"no complete answer in {wait:g} s"
    if answer.failure:
        return answer.failure
    try:
        count = json.loads(answer.body)["clusterMetrics"]["activeNodes"]
    except (ValueError, KeyError, TypeError):
        count = None
    if not isinstance(count, int) or isinstance(count, bool):
        begin = answer.body[:80].decode(errors="replace")
        return f"the answer has no clusterMetrics.activeNodes, it begins with {begin!r}"
    return count


def _fetch(url: str, wait: float, answer: _Answer) -> None:
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import ProxyHandler, Request, build_opener

    deadline = time.monotonic() + wait
    # No proxy: the ResourceManager is in this network, and proxies of clusters lead out of it.
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(Request(url, headers={"Accept": "application/json"}), timeout=wait) as response:
            body = bytearray()
            while chunk := response.read1(65536):
                body += chunk
                if time.monotonic() > deadline:
                    raise TimeoutError
                if len(body) > _MAX_ANSWER_BYTES:
                    break
        answer.body, answer.failure = bytes(body), ""
    except HTTPError as error:
        answer.failure = f"HTTP {error.code} {error.reason}"
        if error.code in (401, 403):
            answer.failure += " (it asks for authentication, which choros submit does not have)"
        error.close()
    except URLError as error:
        reason = error.reason
        answer.failure = (
            (getattr(reason, "strerror", None) or str(reason)) if isinstance(reason, OSError) else str(reason)
        )
    except TimeoutError:
        answer.failure = f"no complete answer in {wait:g} s"
    except (OSError, HTTPException, ValueError) as error:
        answer.failure = f"{type(error).__name__}: {error}"
    finally:
        answer.ended.set()
