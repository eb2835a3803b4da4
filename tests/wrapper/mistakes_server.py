"""Runs scripts as `ones-run` does on a node, each in a fork of one process that has imported torch once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ones_wrapper.launch import node, serve
from ones_wrapper.launch.rank import preload
from ones_wrapper.network.job_network import STORE

if __name__ == "__main__":
    preload({})
    node.preload = lambda env: 0.0
    for line in sys.stdin:
        case = json.loads(line)
        child = os.fork()
        if child == 0:
            log = os.open(case["log"], os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(case["env"])
            code = 99
            try:
                os.environ[STORE] = serve(Path(case["env"]["ONES_JOB_DIR"]), {})
                code = node.main(case["command"])
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
