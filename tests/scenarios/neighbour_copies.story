A node is killed; what its ranks had captured lies, whole, on the node of the neighbouring stage

job   megatron or deepspeed, tp2 pp2 dp2, 4 nodes, distributed optimizer, 20 iterations
flags --reft-redundancy neighbour
runs  with all configurations
when  version 2 is committed on every node
do    kill n2
do    start s first
when  the job has ended
then  s restored from node, iteration >= 2
then  the final state is golden
