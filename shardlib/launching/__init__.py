"""Starting one program on many hosts, with what people have already.

    job.py          what is to run, and on what: `Job`
    submission.py   what an engine makes of it, files and commands: `Submission`
    slurm.py, kubernetes.py, tpu_vm.py, ray.py, skypilot.py
                    engines: functions from a job and their own settings to a submission
    local.py        processes of this machine, started, shown, stopped
    join.py         what every process does first: find the others
"""
