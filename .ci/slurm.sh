#!/bin/bash
# Installs and starts Slurm on this one machine, for the tests of `benchmark/grid.py --slurm`.
# For root on Debian; elsewhere, or where it cannot work, it says why and the tests are skipped.
# It changes nothing where a Slurm answers already, and never fails its caller.

state=/var/lib/slurm-for-tests

answers() { timeout 5 sinfo --noheader --format=%t 2>/dev/null | grep -qE 'idle|mix|alloc'; }
give_up() { echo "slurm.sh: $1: the Slurm tests will be skipped"; exit 0; }

if answers; then echo "slurm.sh: Slurm is running"; exit 0; fi
[ "$(id -u)" = 0 ] || give_up "not root"
command -v apt-get >/dev/null || give_up "not Debian"
if [ -e /etc/slurm/slurm.conf ] && ! grep -q "$state" /etc/slurm/slurm.conf; then
    give_up "there is a Slurm configuration that is not ours"
fi

mkdir -p "$state/ctld" "$state/d"
missing() { for p in slurmctld slurmd munged sbatch; do command -v $p >/dev/null || return 0; done; return 1; }
if missing; then
    export DEBIAN_FRONTEND=noninteractive
    install=(apt-get install -y -qq --no-install-recommends slurm-wlm munge)
    "${install[@]}" >"$state/install.log" 2>&1 ||
        { apt-get update -qq && "${install[@]}"; } >>"$state/install.log" 2>&1 ||
        give_up "cannot install slurm-wlm and munge ($state/install.log)"
fi

# munge signs Slurm's messages.
mkdir -p /run/munge /var/log/munge /var/lib/munge /etc/munge
chown munge: /run/munge /var/log/munge /var/lib/munge /etc/munge
if [ ! -s /etc/munge/munge.key ]; then
    dd if=/dev/urandom of=/etc/munge/munge.key bs=1 count=1024 status=none
    chown munge: /etc/munge/munge.key && chmod 400 /etc/munge/munge.key
fi
munge -n >/dev/null 2>&1 || runuser -u munge -- munged --force >/dev/null 2>&1

# Four CPUs, whatever the machine has; a requeued job starts again after seconds, not two minutes.
host=$(hostname -s)
mkdir -p /etc/slurm
cat >/etc/slurm/slurm.conf <<END
ClusterName=tests
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=6
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
KillWait=10
MinJobAge=300
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/d
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
END
running() { [ -e "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }
running "$state/slurmctld.pid" || slurmctld >/dev/null 2>&1
running "$state/slurmd.pid" || slurmd >/dev/null 2>&1
for _ in $(seq 40); do
    if answers; then echo "slurm.sh: started Slurm"; exit 0; fi
    sleep 0.5
done
give_up "Slurm does not start ($state/*.log)"
