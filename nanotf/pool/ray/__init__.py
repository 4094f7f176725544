"""Workers on the nodes of a Ray cluster. Ray chooses the nodes and starts the hosts' agents there.

    parent, on its node                           each other node that has workers
      ray_hosts.RayHosts                            ray_agent.RayAgent, an actor
        placement group: one bundle a node ------>    holds the node's CPUs
        Hosts, listens  <----- joins, TCP --------    Agent, as on a host of `nanotf run --hosts`

Everything else is that of `hosts`: the parent starts the workers of its own node itself, agents
lend the others, gradients take shared memory on a node and TCP between nodes. If all workers fit on
the parent's node, Ray only holds their CPUs, and nothing listens.

Ray restarts an actor that has ended, on another node if it must, and its agent joins again. The
CPUs are held until another pool needs other ones, and until `nanotf.shutdown()`.
"""
