"""Workers on several hosts, without a cluster manager: `nanotf run --hosts`.

    first host                                    every other host
      nanotf run script.py                          nanotf run script.py (the same command)
        Hosts    listens on one port    <---------    Agent  joins, lends its workers,
          Member   one connection each                       listens for other agents' leaders
        script: fit -> Pool -> HostsCrew --->       Lending: the workers of one pool, forked,
          local workers                                      pinned and supervised as a pool's are
                                                    ends with the script's exit code

    rank 0 of each host  <--- collectives between hosts, see `collectives.peers` --->

Each host has one listener, on one address. Every connection proves the run's secret first, see
`secret` and `wire.network`.

- `agent_messages.py`: the messages between the first host and the others.
- `members.py`, `bridge.py`, `crew.py`: the first host's side.
- `agent.py`, `lending.py`: the other hosts' side.
- `remote.py`: shared memory that both sides have.

`ray` makes hosts of the nodes of a Ray cluster.
"""
