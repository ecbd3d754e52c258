"""``choros submit --on spark --master yarn --nodes auto``, with an HTTP server that has recorded answers."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from choros.cli import main
from choros.errors import InvalidInputError
from choros.launch.schedulers.yarn import active_nodes, resource_managers

# As in the documentation of Hadoop's ResourceManager REST API, of a cluster with more nodes.
RECORDED = json.dumps(
    {
        "clusterMetrics": {
            "appsSubmitted": 0,
            "appsCompleted": 0,
            "appsPending": 0,
            "appsRunning": 0,
            "appsFailed": 0,
            "appsKilled": 0,
            "reservedMB": 0,
            "availableMB": 17408,
            "allocatedMB": 0,
            "reservedVirtualCores": 0,
            "availableVirtualCores": 7,
            "allocatedVirtualCores": 1,
            "containersAllocated": 0,
            "containersReserved": 0,
            "containersPending": 0,
            "totalMB": 17408,
            "totalVirtualCores": 8,
            "totalNodes": 12,
            "lostNodes": 1,
            "unhealthyNodes": 1,
            "decommissioningNodes": 0,
            "decommissionedNodes": 1,
            "rebootedNodes": 0,
            "activeNodes": 9,
            "shutdownNodes": 0,
        }
    }
)
STANDBY = "This is standby RM. The redirect url is: "


@pytest.fixture
def script_folder(tmp_path, monkeypatch):
    """A directory with a script and an empty directory of Hadoop's settings, which nothing names."""
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text('Trainer(model, launcher="spark")')
    (tmp_path / "conf").mkdir()
    return tmp_path


@pytest.fixture
def manager():
    """Start an HTTP server that gives one answer; what it was asked for is kept."""
    servers = []

    def start(body=RECORDED, code=200, location="", drip=None, in_header=False):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.asked.append((self.path, self.headers["Accept"]))
                self.send_response(code)
                if drip is not None and in_header:
                    self.flush_headers()
                    self.wfile.write(b"X-Endless: ")
                    while not drip.wait(0.05):
                        self.wfile.write(b"x")
                    return
                if location:
                    self.send_header("Location", location)
                if drip is None:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if drip is None:
                    self.wfile.write(body.encode())
                while drip is not None and not drip.wait(0.05):
                    self.wfile.write(b" ")
                self.close_connection = True

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.asked, server.address = [], f"127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def settings(script_folder):
    """Write yarn-site.xml."""

    def write(values, folder="conf"):
        pairs = (f"<property><name>{name}</name><value> {value}\n</value></property>" for name, value in values.items())
        (script_folder / folder).mkdir(exist_ok=True)
        (script_folder / folder / "yarn-site.xml").write_text(
            f"<?xml version='1.0'?><configuration>{''.join(pairs)}</configuration>"
        )
        return str(script_folder / folder)

    return write


@pytest.fixture
def submit(script_folder, capsys):
    """Print the script of a job on YARN; return its number of executors and stderr, or the error."""

    def run(*options, code=0):
        command = [
            "submit",
            "--on",
            "spark",
            "--master",
            "yarn",
            "--python",
            "python",
            *options,
            "--dry-run",
            "train.py",
        ]
        assert main(command) == code
        printed = capsys.readouterr()
        if code:
            assert printed.out == ""
            see = "See 'choros submit --help'\n"
            assert printed.err.endswith(see)
            return printed.err.removesuffix(see)
        [count] = [line.split("=")[1] for line in printed.out.splitlines() if "spark.executor.instances" in line]
        return int(count.rstrip(" \\")), printed.err

    return run


ADDRESS = "yarn.resourcemanager.webapp.address"


@pytest.mark.parametrize("variable", ["HADOOP_CONF_DIR", "YARN_CONF_DIR"])
@pytest.mark.parametrize(("options", "nodes"), [(["--max-nodes", "7"], 7), (["--max-nodes", "40"], 9), ([], 9)])
def test_a_job_has_as_many_nodes_as_are_active(manager, settings, submit, monkeypatch, variable, options, nodes):
    server = manager()
    monkeypatch.setenv(variable, settings({ADDRESS: server.address, "yarn.nodemanager.x": "1"}))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # of clusters: it leads out of them
    count, printed = submit("--nodes", "auto", *options)
    assert count == nodes
    url = f"http://{server.address}/ws/v1/cluster/metrics"
    assert printed == f"choros submit: YARN has 9 active nodes ({url}): --nodes {nodes}\n"
    assert server.asked == [("/ws/v1/cluster/metrics", "application/json")]


@pytest.mark.parametrize("form", ["{}", "http://{}", "http://{}/", "http://{}/ws/v1/cluster/metrics"])
def test_an_address_that_is_given_comes_before_the_settings(manager, settings, submit, monkeypatch, form):
    monkeypatch.setenv("HADOOP_CONF_DIR", settings({ADDRESS: "127.0.0.1:9"}))
    server = manager()
    assert submit("--nodes", "auto", "--resource-manager", form.format(server.address))[0] == 9
    assert server.asked[0][0] == "/ws/v1/cluster/metrics"


def test_the_first_directory_that_has_the_file_counts(manager, script_folder, settings, submit, monkeypatch):
    server = manager()
    monkeypatch.setenv("HADOOP_CONF_DIR", str(script_folder / "conf"))
    monkeypatch.setenv("YARN_CONF_DIR", settings({ADDRESS: server.address}, "yarn"))
    assert submit("--nodes", "auto")[0] == 9


@pytest.mark.parametrize("first", ["ended", "standby"])
def test_of_several_resource_managers_the_active_one_answers(manager, settings, submit, monkeypatch, first):
    """One that has ended is left for the next one; a standby one leads to the active one, as YARN's does."""
    active = manager()
    url = f"http://{active.address}/ws/v1/cluster/metrics"
    other = manager(STANDBY + url, 307, url).address if first == "standby" else "127.0.0.1:9"
    values = {"yarn.resourcemanager.ha.enabled": "true", "yarn.resourcemanager.ha.rm-ids": "rm1, rm2"}
    values |= {f"{ADDRESS}.rm1": other, f"{ADDRESS}.rm2": active.address}
    monkeypatch.setenv("HADOOP_CONF_DIR", settings(values))
    assert submit("--nodes", "auto", "--max-nodes", "3")[0] == 3
    assert len(active.asked) == 1


@pytest.mark.parametrize(
    ("values", "urls"),
    [
        ({"yarn.resourcemanager.hostname": "head"}, ["http://head:8088"]),
        ({ADDRESS: "${yarn.resourcemanager.hostname}:80", "yarn.resourcemanager.hostname": "head"}, ["http://head:80"]),
        ({"yarn.http.policy": "HTTPS_ONLY", "yarn.resourcemanager.hostname": "head"}, ["https://head:8090"]),
        (
            {
                "yarn.http.policy": "HTTPS_ONLY",
                "yarn.resourcemanager.webapp.https.address": "head:443",
                ADDRESS: "head:80",
            },
            ["https://head:443"],
        ),
        (
            {
                "yarn.resourcemanager.ha.enabled": "true",
                "yarn.resourcemanager.ha.rm-ids": "a,b",
                "yarn.resourcemanager.hostname.a": "head",
                f"{ADDRESS}.b": "two:1",
            },
            ["http://head:8088", "http://two:1"],
        ),
    ],
)
def test_where_the_settings_say_that_it_is(settings, values, urls):
    answered = resource_managers({"HADOOP_CONF_DIR": settings(values)})
    assert list(answered) == [f"{url}/ws/v1/cluster/metrics" for url in urls]


REMEDY = "or give the number itself, as in --nodes 4\n"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"code": 500, "body": "broken"}, "HTTP 500 Internal Server Error"),
        ({"code": 401, "body": ""}, "HTTP 401 Unauthorized (it asks for authentication"),
        ({"body": "<html>log in"}, "the answer has no clusterMetrics.activeNodes, it begins with '<html>log in'"),
        ({"body": '{"clusterMetrics": {"activeNodes": "9"}}'}, "the answer has no clusterMetrics.activeNodes"),
        ({"body": "[]"}, "the answer has no clusterMetrics.activeNodes"),
        ({"code": 307, "body": STANDBY, "location": "http://127.0.0.1:9/"}, "Connection refused"),
    ],
)
def test_an_answer_without_the_number_is_an_error_that_names_the_url(manager, submit, answer, why):
    server = manager(**answer)
    printed = submit("--nodes", "auto", "--resource-manager", server.address, code=2)
    assert f" http://{server.address}/ws/v1/cluster/metrics: {why}" in printed
    assert "Give another address by --resource-manager HOST:PORT, " in printed
    assert printed.endswith(REMEDY)


def test_a_cluster_without_active_nodes(manager, submit):
    server = manager('{"clusterMetrics": {"activeNodes": 0}}')
    printed = submit("--nodes", "auto", "--resource-manager", server.address, code=2)
    assert printed.startswith("choros submit: error: YARN has no active node (http://127.0.0.1:")
    assert printed.endswith(REMEDY)


def test_nobody_answers_there(settings, submit, monkeypatch):
    monkeypatch.setenv("HADOOP_CONF_DIR", settings({ADDRESS: "127.0.0.1:9"}))
    assert "http://127.0.0.1:9/ws/v1/cluster/metrics: Connection refused" in submit("--nodes", "auto", code=2)
    monkeypatch.setenv("HADOOP_CONF_DIR", settings({ADDRESS: "head.invalid:8088"}))
    printed = submit("--nodes", "auto", code=2)
    assert "http://head.invalid:8088/ws/v1/cluster/metrics: " in printed
    assert printed.endswith(REMEDY)


@pytest.mark.parametrize("in_header", [True, False])
def test_the_wait_is_bounded_also_for_an_answer_that_never_ends(manager, in_header):
    ending = threading.Event()
    server = manager(drip=ending, in_header=in_header)
    began = time.monotonic()
    with pytest.raises(
        InvalidInputError, match=f"http://{server.address}/ws/v1/cluster/metrics: no complete answer in 0.5 s"
    ):
        active_nodes(server.address, wait=0.5)
    assert 0.5 <= time.monotonic() - began < 5
    ending.set()
    for thread in threading.enumerate():
        if thread.name == "choros-yarn":
            thread.join(5)
            assert not thread.is_alive()


def test_nothing_says_where_it_is(script_folder, settings, submit, monkeypatch):
    printed = submit("--nodes", "auto", code=2)
    assert "nothing says where it is: set HADOOP_CONF_DIR to the directory of yarn-site.xml, give" in printed
    monkeypatch.setenv("HADOOP_CONF_DIR", str(script_folder / "conf"))
    file = script_folder / "conf" / "yarn-site.xml"
    assert f"nothing says where it is (there is no {file})" in submit("--nodes", "auto", code=2)
    settings({"yarn.acl.enable": "true"})
    assert f"{file} has no {ADDRESS}, nor yarn.resourcemanager.hostname" in submit("--nodes", "auto", code=2)
    settings({ADDRESS: "${env.HEAD}:8088"})
    assert f"{file} has no {ADDRESS}" in submit("--nodes", "auto", code=2)
    file.write_text("<configuration>")
    printed = submit("--nodes", "auto", code=2)
    assert f"whose address is in {file}, which cannot be read" in printed
    assert printed.endswith(REMEDY)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--on pbs --nodes auto", "--nodes auto is for --on spark --master yarn: elsewhere give a number"),
        ("--on spark --master spark://head:7077 --nodes auto", "--nodes auto is for --on spark --master yarn"),
        ("--on spark --master sc://head --nodes auto", "--nodes is for the cluster's own server"),
        ("--on spark --master yarn --max-nodes 7", "--max-nodes is for --nodes auto: give that too"),
        ("--on spark --master yarn --nodes 2 --resource-manager h:1", "--resource-manager is for --nodes auto"),
        ("--on pbs --max-nodes 7", "--max-nodes is for --on spark"),
        ("--on spark --nodes some", "argument --nodes: must be a whole number of 1 or more, or auto, got some"),
        ("--on spark --master yarn --nodes auto --max-nodes 0", "must be a whole number of 1 or more, got 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(script_folder, capsys, options, why):
    assert main(["submit", *options.split(), "--dry-run", "train.py"]) == 2
    assert why in capsys.readouterr().err
