A node is killed while its snapshot process writes a checkpoint: half of it is never taken for all of it

job    megatron, tp2 pp2 dp2, 4 nodes, distributed optimizer, 14 iterations
runs   with all configurations
store  every 3 iterations
fault  n2 persist.file@rank=5,iteration=6:stop
when   the smp of n2 has stopped
then   checkpoint 6 is not complete
do     kill n2
do     start s first
when   the job has ended
then   s restored from node, iteration >= 4
then   no rank started from scratch
then   complete checkpoints are intact, the newest >= 12
then   the final state is golden
