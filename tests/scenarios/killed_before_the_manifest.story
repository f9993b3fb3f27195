The node that completes checkpoints is killed when all files of one are there, but not its manifest

job    megatron, tp2 pp2 dp2, 4 nodes, distributed optimizer, 14 iterations
runs   with all configurations
store  every 3 iterations
fault  n0 persist.manifest.before@iteration=6:stop
when   the smp of n0 has stopped
then   checkpoint 6 is not complete
do     kill n0
do     start s last
when   the job has ended
then   s restored from node, iteration >= 4
then   no rank started from scratch
then   complete checkpoints are intact, the newest >= 12
then   the final state is golden
