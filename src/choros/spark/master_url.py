"""The URL of a Spark cluster: its form, and whether a server answers there. Without pyspark and without Java."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from choros.cluster.hardware.network_address import host_and_port
from choros.errors import InvalidInputError

_FORMS = re.compile(
    r"local(\[\s*(\d+|\*)\s*(,\s*\d+\s*)?\])?|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]|yarn"
    r"|k8s://.+|spark://[^,/]+:\d+(,[^,/]+:\d+)*|sc://(\[[\da-fA-F:.]+\]|[^/:\[\]]+)(:\d+)?(/.*)?"
)
_CONNECT_PORT = 15002
_MAX_PORT = 65_535
_SECONDS = 5.0  # for one connection
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")  # that gRPC may use for sc://


def check_url(url: str) -> None:
    """Check the form of a URL; "" stands for Spark's own settings.

    Raises:
        InvalidInputError: Spark could not parse it.

    Example:
        >>> check_url("spark://head:7077,other:7077")
        >>> check_url("spark:/head:7077")
        Traceback (most recent call last):
        ...
        choros.errors.InvalidInputError: 'spark:/head:7077' is not the URL of a Spark cluster: give one such as \
spark://head:7077, yarn, sc://head:15002 or local[2].
    """
    if url and not (_FORMS.fullmatch(url) and all(port <= _MAX_PORT for _, port in _servers(url))):
        raise InvalidInputError(
            f"{url!r} is not the URL of a Spark cluster: give one such as spark://head:7077, yarn, sc://head:15002 or "
            "local[2]."
        )


def unreachable(url: str) -> str:
    """Return the reason why no server answers at a URL, with a remedy; "" if one does, or if only Spark can tell.

    Example:
        >>> unreachable("local[2]")
        ''
        >>> unreachable("spark://no.such.host.invalid:7077").partition(" (")[0]
        'no Spark master answers at spark://no.such.host.invalid:7077'
    """
    if url == "yarn" and not _has_hadoop_settings():
        return "yarn needs the cluster's settings: set HADOOP_CONF_DIR to the directory that has its yarn-site.xml"
    is_connect = url.startswith("sc://")
    if is_connect and any(os.environ.get(name) for name in _PROXIES):
        return ""
    reasons = []
    for host, port in _servers(url):
        try:
            socket.create_connection((host, port), _SECONDS).close()
            return ""
        except OSError as error:
            reasons.append(error.strerror or str(error))
    if not reasons:
        return ""
    server = "Spark Connect server" if is_connect else "Spark master"
    causes = ", ".join(dict.fromkeys(reasons))
    return f"no {server} answers at {url} ({causes}): correct the URL, or start the server there"


def _has_hadoop_settings() -> bool:
    if os.environ.get("HADOOP_CONF_DIR") or os.environ.get("YARN_CONF_DIR"):
        return True
    home = os.environ.get("SPARK_HOME", "")
    folder = os.environ.get("SPARK_CONF_DIR") or (f"{home}/conf" if home else "")
    return bool(folder) and Path(folder, "spark-env.sh").exists()  # which may set them


def _servers(url: str) -> list[tuple[str, int]]:
    """Return the hosts and ports of a URL; none if it names no server by itself."""
    if url.startswith("spark://"):
        places = [host_and_port(place) for place in url.removeprefix("spark://").split(",")]
        return [(host, port) for host, port in places if port is not None]
    if url.startswith("sc://"):
        host, port = host_and_port(url.removeprefix("sc://").partition("/")[0])
        return [(host, port or _CONNECT_PORT)]
    return []
