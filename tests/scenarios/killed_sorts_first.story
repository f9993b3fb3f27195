A node is killed, a substitute that sorts first takes its place

job   megatron or deepspeed, tp2 pp2 dp2, 4 nodes, distributed optimizer, 20 iterations
when  version 2 is committed on every node
do    kill n2
do    start s first
when  the job has ended
then  s restored from node, iteration >= 2
then  the final state is golden
