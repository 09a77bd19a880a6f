"""The application on a local Ray, deployed as a user does it: engines of the embedded model.

With ``-s`` the tests print the figures of docs/benchmarks/server.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

pytest.importorskip("ray.serve")
import ray
from ray import serve

from tests.server.process import free_ports

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/ray-serve/razor.yaml"
SERVE = str(Path(sys.executable).with_name("serve"))
# Engines' processes take what importing torch and transformers takes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

DOCUMENTS, QUESTIONS, LENGTH = 4, 10, 32


def document(town: int) -> str:
    years = (f"In year {1900 + i} the town {town} had {i * (town + 7)} wells. " for i in range(60))
    return f"Report {town}. {''.join(years)}"


class Application:
    """The application that the file describes, at the proxy of a Ray with two CPUs."""

    def __init__(self, folder: Path, dashboard: int, port: int) -> None:
        self._file, self._dashboard = folder / "razor.yaml", dashboard
        self.described = yaml.safe_load(FILE.read_text())
        self.described["http_options"] = {"host": "127.0.0.1", "port": port}
        [application] = self.described["applications"]
        store = str(folder / "{engine}")
        application["args"] = {"cpus_per_rank": 0.5, "pinned_gb": 0.5, "window_min": 256}
        application["args"]["prefix_store"] = store
        self._scaling = application["deployments"][0]["autoscaling_config"]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)

    def deploy(self, least: int, most: int | None = None, **scaling: float) -> None:
        """Deploy ``least`` to ``most`` engines, and wait until as many as the least are there."""
        self._scaling |= {"min_replicas": least, "max_replicas": most or least, **scaling}
        self._file.write_text(yaml.safe_dump(self.described))
        address = f"http://127.0.0.1:{self._dashboard}"
        subprocess.run([SERVE, "deploy", "--address", address, str(self._file)], check=True)
        self.wait_for(least)

    def states(self) -> list[str]:
        found = self.client.get("/health").json() if self._answers() else {}
        return list(found.get("engines", {}).values())

    def _answers(self) -> bool:
        try:
            return self.client.get("/health").headers["content-type"] == "application/json"
        except httpx.TransportError:
            return False

    def wait_for(self, engines: int) -> None:
        """Wait until there are this many engines, all ready."""
        end = time.monotonic() + 300
        while (states := self.states()) != ["ready"] * engines:
            assert time.monotonic() < end, f"not {engines} engines within five minutes: {states}"
            state = serve.status().applications.get("razor")
            assert state is None or state.status != "DEPLOY_FAILED", state.message
            time.sleep(0.5)

    def ask(self, number: int, question: int, **fields: Any) -> dict[str, Any]:
        """Return the answer to a question about a document."""
        prompt = f"{document(number)} In year {1900 + question} the town {number} had"
        body = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": LENGTH}
        response = self.client.post("/v1/completions", json={**body, "ignore_eos": True, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, length: int) -> dict[str, Any]:
        """Return how a stream of so many tokens ends: its usage, or its error."""
        body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": length}
        body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        last: dict[str, Any] = json.loads(lines[-2][6:])
        return last

    def unfinished(self) -> dict[str, int]:
        """Return the requests in each engine, by its number."""
        each = self.client.get("/stats").json()["engines"]
        return {number: stats["unfinished"] for number, stats in each.items()}


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    dashboard, port = free_ports(2)
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers are as nice as can be, and would starve beside whatever else a machine does.
        patch.setenv("RAY_worker_niceness", "0")
        sizes = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
        ray.init("local", include_dashboard=True, dashboard_port=dashboard, **sizes)
    application = Application(tmp_path_factory.mktemp("ray_serve"), dashboard, port)
    with application.client:
        yield application
    serve.shutdown()
    ray.shutdown()


class Run(NamedTuple):
    """Forty answers, by document and question, and what they took."""

    texts: dict[tuple[int, int], str]
    cached: int
    prompt: int
    seconds: float

    def __str__(self) -> str:
        tokens = len(self.texts) * LENGTH
        return (
            f"{len(self.texts)} answers; {self.cached} of {self.prompt} prompt tokens cached "
            f"({self.cached / self.prompt:.1%}), {tokens / self.seconds:.1f} tokens a second "
            f"({self.seconds:.1f} s)"
        )


class Asking:
    """Forty questions, of which four are in flight: one about each document."""

    def __init__(self, application: Application, pool: ThreadPoolExecutor, salt: str) -> None:
        self._begun = time.monotonic()
        self.futures: dict[tuple[int, int], Future[dict[str, Any]]] = {
            (number, question): pool.submit(application.ask, number, question, cache_salt=salt)
            for question in range(QUESTIONS)
            for number in range(DOCUMENTS)
        }

    def result(self) -> Run:
        answers = {which: future.result() for which, future in self.futures.items()}
        usages = [answer["usage"] for answer in answers.values()]
        return Run(
            {which: answer["choices"][0]["text"] for which, answer in answers.items()},
            sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages),
            sum(usage["prompt_tokens"] for usage in usages),
            time.monotonic() - self._begun,
        )


def forty(application: Application, salt: str) -> Run:
    with ThreadPoolExecutor(DOCUMENTS) as pool:
        return Asking(application, pool, salt).result()


@pytest.fixture(scope="module")
def of_one(application: Application) -> Run:
    """The forty questions to one engine."""
    application.deploy(1)
    return forty(application, "one")


def test_a_documents_questions_land_where_it_was_read(
    application: Application, of_one: Run
) -> None:
    application.deploy(2)
    of_two = forty(application, "two")
    print(f"\none engine: {of_one}\ntwo engines: {of_two}")
    assert of_two.texts == of_one.texts
    assert of_two.cached >= 0.99 * of_one.cached
    each = application.client.get("/stats").json()["engines"].values()
    hits = [stats["prefix_cache"]["hits"] for stats in each]
    assert min(hits) >= QUESTIONS - 1, hits  # both of them work


def test_what_one_engine_has_all_have(application: Application) -> None:
    application.deploy(2)
    client = application.client
    assert client.get("/health").json()["engines"] == {"0": "ready", "1": "ready"}
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["smollm2"]
    assert set(client.get("/stats").json()["engines"]) == {"0", "1"}
    running = [x for x in client.get("/metrics").text.splitlines() if "num_requests_running{" in x]
    assert len(running) == 2
    wrong = client.post("/v1/completions", json={"model": "smollm2", "promt": "a"})
    assert wrong.status_code == 400 and "promt" in wrong.json()["error"]["message"]
    assert client.get("/v1/nothing").status_code == 404
    assert "razor" in client.get("/").text and client.get("/page/api.js").status_code == 200
    assert client.get("/health", headers={"host": "evil.example"}).status_code == 403
    id_ = {"x-request-id": "my-own"}
    assert client.get("/v1/models", headers=id_).headers.get_list("x-request-id") == ["my-own"]


def test_a_client_that_hangs_up_ends_its_request(application: Application) -> None:
    application.deploy(2)
    body = {"model": "smollm2", "prompt": "Once", "max_tokens": 4000, "stream": True}
    body["ignore_eos"] = True
    with application.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    for _ in range(100):
        if not any(application.unfinished().values()):
            return
        time.sleep(0.1)
    raise AssertionError("the request is still answered")


def test_a_queue_brings_an_engine_and_one_that_goes_ends_what_it_has_begun(
    application: Application,
) -> None:
    application.deploy(1)
    quick = {"upscale_delay_s": 1, "look_back_period_s": 12, "target_ongoing_requests": 2}
    application.deploy(1, 2, **quick)
    with ThreadPoolExecutor(6) as pool:
        begun = time.monotonic()
        streams = [pool.submit(application.stream, 400) for _ in range(6)]
        application.wait_for(2)
        print(f"\nsix requests, two an engine: a second one after {time.monotonic() - begun:.0f} s")
        assert [one.result()["usage"]["completion_tokens"] for one in streams] == [400] * 6

    application.deploy(2)
    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(application.stream, 1000) for _ in range(2)]
        while sorted(application.unfinished().values()) != [1, 1]:
            time.sleep(0.1)
        application.deploy(1)  # one of them is ending, which takes nothing more
        assert not any(stream.done() for stream in streams), "too short to show anything"
        assert application.ask(0, 0)["usage"]["completion_tokens"] == LENGTH
        assert [one.result()["usage"]["completion_tokens"] for one in streams] == [1000] * 2
    assert application.states() == ["ready"]


def engines() -> dict[int, list[int]]:
    """The process ids of each engine: its frontend's, and its ranks'."""
    return dict(serve.get_deployment_handle("Engine", "razor").broadcast("processes").results())


@pytest.mark.parametrize("which", ["rank", "frontend"])
def test_nothing_is_lost_with_an_engine(application: Application, of_one: Run, which: str) -> None:
    """All forty answers are there; a stream that has begun ends with an error."""
    application.deploy(2)
    with ThreadPoolExecutor(1) as alone, ThreadPoolExecutor(DOCUMENTS) as pool:
        stream = alone.submit(application.stream, 4000)
        while 1 not in (busy := application.unfinished()).values():
            time.sleep(0.1)
        [victim] = [int(number) for number, unfinished in busy.items() if unfinished]
        asking = Asking(application, pool, f"without a {which}")
        asking.futures[0, 2].result()
        frontend, *ranks = engines()[victim]
        os.kill(ranks[0] if which == "rank" else frontend, signal.SIGKILL)
        run = asking.result()
        print(f"\nan engine's {which} killed in the middle: {run}")
        assert run.texts == of_one.texts
        assert stream.result()["error"]["code"] == "engine_error"
    application.wait_for(2)


def test_an_engine_that_hangs_hides_no_other(application: Application) -> None:
    application.deploy(2)
    frontend = engines()[1][0]
    os.kill(frontend, signal.SIGSTOP)
    try:
        assert application.states() == ["ready"]
        assert set(application.unfinished()) == {"0"}
    finally:
        os.kill(frontend, signal.SIGCONT)
    application.wait_for(2)


def test_contexts_are_asked_where_they_are(application: Application) -> None:
    application.deploy(2)
    client = application.client
    mark = {"cache_control": {"type": "ephemeral"}}
    chat: dict[str, Any] = {"model": "smollm2", "max_tokens": 4}

    def ask(content: object, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return client.post("/v1/chat/completions", json={**chat, "messages": messages, **fields})

    def keep(number: int) -> str:
        kept = {"type": "text", "text": document(number), **mark}
        answer = ask([kept, {"type": "text", "text": "\n\nWho?"}])
        assert answer.status_code == 200, answer.text
        id_: str = answer.json()["contexts"][0]["id"]
        return id_

    with ThreadPoolExecutor(DOCUMENTS) as pool:
        ids = list(pool.map(keep, range(DOCUMENTS)))
    assert len({id_[:12] for id_ in ids}) == 2
    listed = client.get("/v1/contexts").json()["data"]
    assert {context["id"] for context in listed} == set(ids)
    for id_ in ids:
        usage = ask("\n\nWho?", context=id_).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 900
        assert client.get(f"/v1/contexts/{id_}").json()["id"] == id_

    os.kill(engines()[0][0], signal.SIGKILL)  # its successor has another name and the same store
    time.sleep(1)
    application.wait_for(2)
    for id_ in ids:
        assert ask("\n\nWho?", context=id_).status_code == 200
        assert client.delete(f"/v1/contexts/{id_}").json()["deleted"]
        assert client.get(f"/v1/contexts/{id_}").status_code == 404
    assert client.get("/v1/contexts").json()["data"] == []
