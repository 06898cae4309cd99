"""What the parts of a run are given when it comes up."""

from types import SimpleNamespace

from slime.cluster import launch as launch_module
from slime.cluster.launch import _open_reporter
from slime.config import Config
from slime.observability.logprob_diagnosis import LogprobFacts, SideFacts


def test_the_diagnosis_of_log_probs_asks_engines_that_are_there_by_then(monkeypatch, tmp_path):
    asked, monitors = [], []

    def facts(config, urls):
        asked.extend(urls)
        return LogprobFacts(trainer=SideFacts(), engine=SideFacts())

    monkeypatch.setattr(launch_module, "logprob_facts", facts)
    monkeypatch.setattr(launch_module, "LogprobMonitor", lambda bound, **given: monitors.append(given["facts"]))
    engines = SimpleNamespace(urls=["http://first"])
    reporter = _open_reporter(Config(), tmp_path, engines, first_step=0)
    reporter.close()
    engines.urls = ["http://second"]
    monitors[0]()
    assert asked == ["http://second"]
