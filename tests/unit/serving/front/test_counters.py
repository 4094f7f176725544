"""The server's metrics in Prometheus's format."""

import re

from nanotf.serving.front.counters import Counters

LINE = re.compile(r"^(# TYPE \S+ (gauge|counter|histogram)|[a-zA-Z_:][\w:]*(\{.*\})? \S+)$")


def test_every_line_is_of_the_format():
    counters = Counters()
    counters.gauges["nanotf_queue_requests"] = lambda: 3
    counters.totals["nanotf_worker_restarts_total"] = lambda: 2
    counters.answered('a "quoted"\nname\\', "predict", 200, 0.001)
    counters.answered("m", "predict", 503, 0.001)
    counters.computed("m", 7, 0.004)
    counters.rejected("full")
    text = counters.text().decode()
    assert all(LINE.match(line) for line in text.splitlines())
    assert "# TYPE nanotf_queue_requests gauge\nnanotf_queue_requests 3\n" in text
    of_restarts = "# TYPE nanotf_worker_restarts_total counter\nnanotf_worker_restarts_total 2\n"
    assert of_restarts in text
    assert ':tensorflow:serving:request_count{model_name="m",status="UNAVAILABLE"} 1' in text
    assert ':tensorflow:serving:request_example_count_total{model="m"} 7' in text
    assert 'nanotf_rejected_total{reason="full"} 1' in text


def test_buckets_add_up():
    counters = Counters()
    for micros in (5, 11, 11, 1e9, 1e30):
        counters.answered("m", "predict", 200, micros / 1e6)
    lines = [
        line for line in counters.text().decode().splitlines() if "request_latency_bucket" in line
    ]
    found = [int(line.rsplit(" ", 1)[1]) for line in lines]
    assert found == sorted(found)
    assert len(found) == 34  # TensorFlow Serving's 33, and the rest
    assert (found[0], found[1], found[-1]) == (1, 3, 5)
    assert 'le="10"' in lines[0] and 'le="18"' in lines[1] and 'le="+Inf"' in lines[-1]
