Two nodes of one sharding group are killed at once: it is cut into groups of two, each of which makes up for one

job    megatron, tp2 pp2 dp4, 4 nodes, distributed optimizer
flags  --reft-group-nodes 2
when   version 2 is committed on every node
do     kill n0
do     kill n1
do     start s0 first
do     start s1 last
when   the job has ended
then   s0 restored from node, iteration >= 2
then   s1 restored from node, iteration >= 2
then   the final state is golden
