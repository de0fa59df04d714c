"""Check `deploy/` against the server: flags, paths, ports, times. Nothing is built or started."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.run_dockerfile import ignored, instructions
from server.__main__ import LAST_SECONDS
from server.cli.options import parse
from server.http.gate import OPEN_PATHS

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
STEPS = instructions((DEPLOY / "Dockerfile").read_text())
LAST = dict(STEPS)
PATTERNS = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool not found; on Debian: apt install prometheus"
)


def promtool(*args):
    """Its exit status; what it says is shown when a test fails."""
    return subprocess.run(["promtool", *map(str, args)]).returncode


def flags(argv):
    """The flags of a command line that runs the server, as the server reads them."""
    place = argv.index("server")
    assert argv[place - 1] == "-m"
    return parse(argv[place + 1 :])


def test_the_image_copies_what_is_there_and_sent():
    copied = [rest.split()[:-1] for keyword, rest in STEPS if keyword == "COPY" and "--from" not in rest]
    names = [name for sources in copied for name in sources]
    assert {"jaxspec", "server", "pyproject.toml", "requirements.lock"} <= set(names)
    assert [name for name in names if not (ROOT / name).exists() or ignored(name, PATTERNS)] == []


@pytest.mark.parametrize("path,kept", [
    ("server/playground/index.html", True),
    ("server/playground/vendor/purify.js", True),
    ("jaxspec/drafters/shipped/smollm2-135m-instruct-eagle3/config.json", True),
    ("jaxspec/__pycache__/engine.cpython-312.pyc", False),
    (".git/config", False),
    (".venv/bin/python", False),
    ("tests/conftest.py", False),
    ("deploy/Dockerfile", False),
])  # fmt: skip
def test_the_image_is_sent_the_packages_and_no_more(path, kept):
    assert ignored(path, PATTERNS) == (not kept)


def test_the_image_runs_the_server_itself_as_a_plain_user():
    """In exec form: a shell in between would keep SIGTERM from it."""
    args = flags(json.loads(LAST["ENTRYPOINT"]))
    assert (args.host, args.port) == ("0.0.0.0", int(LAST["EXPOSE"]))
    assert LAST["USER"] not in ("root", "0")


def test_the_image_asks_for_health_where_no_key_is_needed():
    check = json.loads(LAST["HEALTHCHECK"].partition("CMD ")[2])
    (port, path) = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", check[-1]).groups()
    assert port == LAST["EXPOSE"] and path in OPEN_PATHS


def test_every_build_argument_has_its_lock():
    (build,) = [rest for keyword, rest in STEPS if keyword == "RUN" and "--require-hashes" in rest]
    for cuda, lock in (("none", "requirements.lock"), ("12", "requirements-cuda12.lock")):
        shown = build.partition("&&")[0] + '; printf %s "$lock"'
        chosen = subprocess.run(["sh", "-c", shown], env={"CUDA": cuda}, capture_output=True, text=True).stdout
        assert chosen == lock and (ROOT / lock).exists()


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_runs_the_image_and_prometheus_finds_it(profile):
    service = COMPOSE["services"][profile]
    assert service["profiles"] == [profile] and service["build"]["dockerfile"] == "deploy/Dockerfile"
    shell, _, command = service["entrypoint"]
    argv = shlex.split(command.removeprefix("exec ").replace("$$JAXSPEC_ARGS", "--model m --draft none"))
    assert shell == "/bin/sh" and flags(argv).draft == "none"
    assert int(service["stop_grace_period"].removesuffix("s")) > flags(argv).drain_seconds + LAST_SECONDS
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    (alias,) = service["networks"]["default"]["aliases"]
    assert job["static_configs"] == [{"targets": [f"{alias}:{flags(argv).port}"]}]
    assert job["metrics_path"] in OPEN_PATHS


def test_compose_mounts_files_that_are_there():
    mounts = [each for service in COMPOSE["services"].values() for each in service["volumes"]]
    assert mounts
    for mount in mounts:
        source = mount.split(":")[0]
        assert (DEPLOY / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"], mount


def test_nothing_but_the_server_is_open_to_other_machines():
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_the_unit_starts_the_server_and_gives_it_time_to_drain():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DEPLOY / "jaxspec.service")
    service = unit["Service"]
    argv = shlex.split(service["ExecStart"])
    assert argv[:3] == ["/opt/jaxspec/bin/jaxspec", "serve", "--config"]
    assert service["Restart"] == "on-failure" and service["RestartPreventExitStatus"] == "2"
    drain = float(argv[argv.index("--drain-seconds") + 1])
    assert int(service["TimeoutStopSec"]) > drain + LAST_SECONDS


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze not found")
def test_systemd_knows_every_setting_of_the_unit(tmp_path):
    """It ignores unknown ones, with a warning."""
    unit = tmp_path / "jaxspec.service"
    unit.write_text((DEPLOY / "jaxspec.service").read_text().replace("/opt/jaxspec/bin/jaxspec", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    said = [line for line in (done.stdout + done.stderr).splitlines() if str(unit) in line or unit.name in line]
    assert (done.returncode, said) == (0, [])


@needs_promtool
def test_prometheus_takes_its_configuration():
    assert promtool("check", "config", DEPLOY / "prometheus.yml") == 0


@needs_promtool
def test_prometheus_can_read_every_query_of_the_dashboard(tmp_path):
    panels = json.loads((DEPLOY / "grafana" / "jaxspec.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    plain = [query.replace("$__rate_interval", "1m").replace("$model_name", "m") for query in queries]
    assert not any("$" in query for query in plain), "a variable that the dashboard doesn't define"
    rules = [{"record": f"panel:query:{i}", "expr": query} for i, query in enumerate(plain)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert promtool("check", "rules", tmp_path / "rules.yml") == 0


def test_grafana_finds_prometheus_and_the_dashboard():
    grafana = COMPOSE["services"]["grafana"]
    at = {source: target for source, target, *_ in (mount.split(":") for mount in grafana["volumes"])}
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "provider.yaml").read_text())["providers"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert source["type"] == "prometheus" and COMPOSE["services"][host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    home = at["./grafana/jaxspec.json"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == home
    assert str(Path(home).parent) == provider["options"]["path"]


def test_the_kubernetes_pods_run_the_server_as_the_image_does():
    secret, claim, deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    args = parse(container["args"])
    (port,) = container["ports"]
    assert port["containerPort"] == parse(json.loads(LAST["ENTRYPOINT"])[3:]).port
    assert {each["targetPort"] for each in service["spec"]["ports"]} == {port["name"]}
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (sleep, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep" and int(seconds) >= 5, "as long as a Service may still send requests to an ending pod"
    assert pod["spec"]["terminationGracePeriodSeconds"] > int(seconds) + args.drain_seconds + LAST_SECONDS
    (cache,) = [each for each in pod["spec"]["volumes"] if each["name"] == "cache"]
    assert cache["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"], "for several replicas"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS
    assert container["envFrom"] == [{"secretRef": {"name": secret["metadata"]["name"]}}]
    assert f"--uid {pod['spec']['securityContext']['runAsUser']} " in (DEPLOY / "Dockerfile").read_text()
