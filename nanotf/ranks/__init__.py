"""Ranks: processes that each run the whole script, and the libraries that connect them.

    nanotf run --ranks -n N script.py
      rank_launch       counts the ranks, alone (`rank_crew`) or with other hosts (`rank_hosts`)
      rank_crew         starts, watches and ends the processes (`rank_order`: what each gets)
        rank_process    the code of a process, before the script
          this_rank     its place among the ranks, and its `collectives.Group`
          strategy_hook  chooses the strategies once the script has imported TensorFlow
          rank_strategy  those of `tf.distribute` over the ranks (`rank_overrides`)
          rank_files     files that are written once
          loss_scales    steps that all ranks skip

`cli` calls the launcher. `nanotf.hvd` and the strategies communicate through the group,
`nanotf.smp` through its mailboxes.
"""
