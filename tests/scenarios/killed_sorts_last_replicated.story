A node is killed, a substitute that sorts last takes its place; parameters and optimizer state are replicated

job   megatron or deepspeed, tp2 pp2 dp2, 4 nodes, replicated optimizer, 20 iterations
runs  with all configurations
when  version 2 is committed on every node
do    kill n2
do    start s last
when  the job has ended
then  s restored from node, iteration >= 2
then  the final state is golden
