A node goes silent while it sends its copies; parameters and optimizer state are replicated

job    megatron, tp2 pp2 dp2, 4 nodes, replicated optimizer, 20 iterations
# a stopped SMP is missed after so long, and before that three iterations go by, on a busy machine too
flags  --baft --baft-profile-iterations 2 --reft-exchange-interval 4 --ftp-detect-seconds 30
runs   with all configurations
fault  n2 exchange.frame@epoch=1,iteration=8,frame=1:stop;exchange.frame@epoch=1,iteration=12,frame=1:stop
when   the smp of n2 has stopped
when   iteration 11 is captured on n0
do     freeze n2
do     start s last
when   the job has ended
then   n2 was declared lost
then   s restored from node, iteration >= 4
then   s restored the committed version, not the one being exchanged
then   no rank started from scratch
then   the final state is golden
