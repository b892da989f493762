"""The mathematics of a step, and the dataclasses that carry its knobs."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    advantages=(
        "ADVANTAGES Advantage DrGRPOAdvantage GAEAdvantage GDPOAdvantage GPGAdvantage GroupAdvantage OPOAdvantage "
        "OptimalTokenBaselineAdvantage PassKAdvantage RLOOAdvantage ReMaxAdvantage ReinforcePlusPlusAdvantage "
        "ReinforcePlusPlusBaselineAdvantage ResponseAdvantage"
    ),
    aggregation="aggregate loss_denominator",
    correction="CORRECTIONS Correction",
    group_filter="GroupFilterConfig",
    kl="KL_ESTIMATORS KLController KLRewardConfig kl_to_reference",
    losses=(
        "CISPOLoss ClipCovLoss ClipLoss DPPOKLLoss DPPOTVLoss DROLoss GPGLoss GSPOLoss GeoMeanLoss KLCovLoss "
        "LOSSES PolicyLoss SAPOLoss value_loss"
    ),
    shaping="OverlongConfig shape_rewards",
    terms="EntropyTerm KLTerm LossTerm PolicyTerm",
    step_metrics="advantage_metrics constant_reward_warning data_metrics mismatch_metrics update_metrics",
)
