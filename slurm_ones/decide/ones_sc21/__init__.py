"""ONES: an online evolutionary search over the GPUs and the batch of every job (SC21, arXiv 2108.03645).

search.py is the policy and reads from the top; space.py is what one decision searches over, genome.py a
candidate, operators.py and placement.py a generation's steps, score.py what is minimised, limits.py how large
a job may become, deploy.py what of the search is put in
force, reasons.py the words. What differs from the paper because this is a real Slurm, and where:

1. Shapes are uniform, part of a node or whole nodes (`decide.shapes`), and a candidate counts only if it can
   be placed: unchanged jobs stay on their nodes, as Slurm does not move them (`placement`).
2. A running job is never taken to zero GPUs, which would be a held job: removing it means its smallest size.
3. Waiting jobs start at their smallest size, first come first served.
4. Jobs that must keep their shape take no part: their GPUs are not in the space (`space`).
5. A resize is a requeue and costs something: `Options.resize_cost_s` weighs it (`score.net_delay`); 0 turns
   this off.
6. Jobs that may not change yet are held in place during the search: `Options.hold_unsettled`; False turns
   this off.
7. Filling comes after reordering, since a free GPU is of use only where a whole shape fits (`operators`).

The defaults of 5 and 6 are ours; with both off the deployed candidate is the paper's.
"""
