"""Starting one program on many hosts, with what people have already.

    job.py          what is to run, and on what: `Job`
    submission.py   what an engine makes of it, files and commands: `Submission`
    slurm.py, kubernetes.py, tpu_vm.py, ray.py, skypilot.py
                    engines: functions from a job and their own settings to a submission
    ray_driver.py   the entrypoint of a job on Ray
    shell.py        what the scripts of several engines have in common
    tpus.py         what Google's tools call TPU slices
    options.py      settings of engines, as a command line spells them
    local.py        processes of this machine, started, shown, stopped
    join.py         what every process does first: find the others
"""
