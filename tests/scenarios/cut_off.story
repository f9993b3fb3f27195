A node is cut off from the network: it is missed, and goes on by itself to no effect

job   megatron, tp2 pp2 dp2, 4 nodes, distributed optimizer
runs  with all configurations
when  version 2 is committed on every node
do    cut n1
do    start s last
when  the job has ended
then  n1 was declared lost
then  s restored from node, iteration >= 2
then  the final state is golden
