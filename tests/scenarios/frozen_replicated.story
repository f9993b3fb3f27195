Every process of a node stops, with all connections open: it is missed all the same

job   megatron, tp2 pp2 dp2, 4 nodes, replicated optimizer
when  version 2 is committed on every node
do    freeze n3
do    start s first
when  the job has ended
then  n3 was declared lost
then  s restored from node, iteration >= 2
then  replicas were compared, little was sent
then  the final state is golden
