"""A candidate for the lead, in a process of its own: `python -m tests.db.candidate URL TAKEOVER_S`.

It asks for the lead again and again, until it is killed. While it leads it writes actions that name its term. It says
on its standard output what `Leadership` says, "wrote TERM" of each action, and "lost" where it led.
"""

from __future__ import annotations

import sys
import time

from ones_db import ActionRecord, NotLeader, Store, StoreError
from ones_db.leader import LeaderLock
from slurm_ones.service.leadership import Leadership


def main(url: str, takeover_s: float) -> None:
    lead = Leadership(LeaderLock(url, "gres"), takeover_s, say=lambda line: print(line, flush=True))
    store: Store | None = None
    while True:
        try:
            if not lead.take():
                if store is not None:
                    print("lost", flush=True)
                store = None
                time.sleep(lead.wait_s)
                continue
            if store is None:
                store = Store.open(url, "gres", term=lead.term)
            store.add_action(ActionRecord(time.time(), "candidate", "write", str(lead.term)))
            lead.check()
            print(f"wrote {lead.term}", flush=True)
            time.sleep(0.05)
        except NotLeader:
            continue
        except StoreError:
            time.sleep(lead.wait_s)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
