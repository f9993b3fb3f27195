The node that also serves the rendezvous is killed

job   megatron, tp2 pp2 dp2, 4 nodes, distributed optimizer
runs  with all configurations
when  version 2 is committed on every node
do    kill n0
do    start s last
when  the job has ended
then  s restored from node, iteration >= 2
then  the final state is golden
